"""The trace commands: what they print and write."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from moeserve_placement.cli.main import trace_group
from moeserve_placement.cli.trace import convert, info, synth
from moeserve_placement.traces import RoutingTrace, TraceError, open_trace, write_trace

ROUTING = Path(__file__).parents[3].parent / "shared" / "data" / "routing"


def run(command: click.Command, *args: object) -> Result:
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_synthetic_trace_is_written_described_and_converted(tmp_path: Path) -> None:
    trace = tmp_path / "zipf.npz"
    result = run(synth, "zipf", trace, "--tokens", 4096, "--layers", 2, "--imbalance", 2.5)
    assert "routing of 4,096 tokens" in result.output
    assert "imbalance realised: 2." in result.output
    shown = run(info, trace)
    assert "max/mean" in shown.output and "co-activation" in shown.output
    found = json.loads(run(info, trace, "--json").output)
    assert found["num_tokens"] == 4096
    assert all(abs(layer["imbalance"] / 2.5 - 1) <= 0.05 for layer in found["layers"])
    done = run(convert, trace, tmp_path / "zipf.json")
    assert done.output.strip().endswith("(npz -> json)")
    counts = run(convert, trace, tmp_path / "window.npz", "--to", "vllm", "--window", 1024)
    assert "counts of 4 windows" in counts.output and "not kept: tokens" in counts.output
    assert "counts of 4 windows" in run(info, tmp_path / "window.npz").output


def test_synth_prints_its_facts_as_json(tmp_path: Path) -> None:
    result = run(
        synth,
        "burst",
        tmp_path / "b.npz",
        "--window",
        2048,
        "--imbalance",
        3,
        "--layers",
        1,
        "--json",
    )
    facts = json.loads(result.output)
    assert facts["synth_kind"] == "burst" and "synth_burst_windows" in facts


def test_a_mix_is_drawn_from_a_labelled_trace(tmp_path: Path) -> None:
    run(synth, "zipf", tmp_path / "a.json", "--layers", 1, "--tokens", 2048)
    source = json.loads((tmp_path / "a.json").read_text())
    for i, sequence in enumerate(source["sequences"]):
        sequence["label"] = "law" if i % 2 else "code"
    (tmp_path / "a.json").write_text(json.dumps(source))
    args = ["--source", tmp_path / "a.json", "--requests", 60, "--rate", 2.0, "--cycle", 10]
    run(synth, "mix", tmp_path / "m.npz", *args, "--seed", 4)
    mixed = open_trace(tmp_path / "m.npz")
    assert isinstance(mixed, RoutingTrace)
    assert mixed.num_sequences == 60 and set(mixed.labels or ()) == {"code", "law"}
    with pytest.raises(TraceError, match="mix does not have it"):
        run(synth, "mix", tmp_path / "m.npz", *args, "--imbalance", 3)
    with pytest.raises(TraceError, match="only mix has it"):
        run(synth, "zipf", tmp_path / "m.npz", "--cycle", 3)


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 cut off",
        b"\x93NUMPY\x01\x00v\x00{'descr'",
        b"\x80\x04K\x01.",
        b'{"format": "moeserve-trace", "version": 1}',
        b'{"format": "moeserve-trace", "version": 9}',
        b"",
    ],
)
def test_a_bad_file_is_one_line_of_error_and_exit_code_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    for args in (["info", str(path)], ["convert", str(path), str(tmp_path / "out.json")]):
        result = CliRunner().invoke(trace_group, args)
        assert result.exit_code == 2
        assert result.output.startswith(f"error: {path}: ")
        assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "out.json").exists()


def _labelled(folder: Path) -> Path:
    ids = np.argsort(np.random.default_rng(0).random((512, 2, 8)), axis=2)[:, :, :2]
    trace = RoutingTrace(
        topk_ids=ids,
        num_experts=8,
        layer_ids=(0, 1),
        sequence_lengths=np.full(32, 16),
        labels=("law", "a\x1b[31mb") * 16,
        metadata={"note": "[/x] :x:", "synth_note": "\x1b[31mred"},
    )
    write_trace(folder / "labelled.json", trace)
    return folder / "labelled.json"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("synth", "mix", "x.npz", "--source", "SOURCE", "--requests", 0), "num_requests = 0: mus"),
        (("synth", "mix", "x.npz", "--source", "SOURCE", "--rate", 0), "requests_per_s = 0.0: mus"),
        (("synth", "mix", "x.npz", "--source", "SOURCE", "--seed", -1), "seed = -1: must be 0 or"),
        (("synth", "zipf", "x.npz", "--seed", -1), "seed = -1: must be 0 or more"),
        (("synth", "zipf", "x.npz", "--tokens", 10**12), "num_tokens = 1000000000000: must be at"),
        (("info", "SOURCE", "--window", 0), "window = 0: must be at least 1"),
        (("info", "SOURCE", "--top-k", 0), "top_k = 0: must be in [1, 1024]"),
        (("convert", "SOURCE", "x.npz", "--window", 0), "window = 0: must be at least 1"),
        (("convert", "SOURCE", "x.npz", "--ranks", 0), "num_ranks = 0: must be in"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    tmp_path: Path, args: tuple[object, ...], text: str
) -> None:
    source = _labelled(tmp_path)
    words = [str(source) if arg == "SOURCE" else str(arg) for arg in args]
    result = CliRunner().invoke(trace_group, words)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {text}") and result.output.count("\n") == 1


def test_names_and_metadata_are_shown_as_they_are(tmp_path: Path) -> None:
    source = _labelled(tmp_path)
    output = run(info, source).output
    assert "note: [/x] :x:" in output and "a\ufffd[31mb 256" in output and "\x1b" not in output
    mixed = run(synth, "mix", tmp_path / "m.npz", "--source", source, "--tolerance", 0.9)
    assert "\ufffd[31mred" in mixed.output and "\x1b" not in mixed.output


def test_co_activation_of_too_many_experts_is_refused(tmp_path: Path) -> None:
    trace = RoutingTrace(
        topk_ids=np.array([[[0, 1]]]),
        num_experts=65536,
        layer_ids=(0,),
        sequence_lengths=np.array([1]),
    )
    write_trace(tmp_path / "wide.json", trace)
    result = CliRunner().invoke(trace_group, ["info", str(tmp_path / "wide.json")])
    assert result.exit_code == 2
    assert result.output.startswith("error: num_experts = 65536: co-activation needs 4 tables")


@pytest.mark.skipif(not ROUTING.is_dir(), reason="needs the real traces in ../shared/data/routing")
def test_the_real_traces_are_opened_and_described() -> None:
    esft = json.loads(run(info, ROUTING / "esft_dsv2lite_top6.npz", "--json").output)
    assert (esft["num_tokens"], esft["num_layers"], esft["top_k"]) == (33279, 26, 6)
    assert set(esft["labels"]) == {"law", "summary", "intent", "translation"}
    # Max / mean of the mix: 2.8 median over layers, 3.4 at most.
    values = sorted(layer["imbalance"] for layer in esft["layers"])
    assert 2.5 < values[13] < 3.1 and 3.2 < values[-1] < 3.6
    gpt = json.loads(run(info, ROUTING / "gptoss20b_top4_decode.npz", "--json").output)
    assert (gpt["num_tokens"], gpt["num_sequences"], gpt["has_weights"]) == (25900, 71, True)
    counts = ROUTING / "olmoe_mixtral_counts.npz"
    olmoe = json.loads(run(info, counts, "--json", "--select", "olmoe").output)
    assert (olmoe["num_windows"], olmoe["num_experts"]) == (6, 64)
