"""Small files and options that ask for a lot: refused with the name of what is too large."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve_placement.placement import Placement
from moeserve_placement.traces import (
    CountTrace,
    ReadOptions,
    RoutingTrace,
    TraceError,
    detect,
    open_any,
    safe_npz,
)
from moeserve_placement.traces.convert import convert
from moeserve_placement.traces.detect import FORMATS
from moeserve_placement.traces.format import write_trace
from moeserve_placement.traces.mix import MixSpec, mix_under_clock, poisson_clock, read_clock
from moeserve_placement.traces.synth import SynthSpec


def routing(*, layer_ids: tuple[int, ...] = (0,), num_experts: int = 4) -> RoutingTrace:
    ids = np.tile(np.array([0, 1]), (6, len(layer_ids), 1))
    return RoutingTrace(
        topk_ids=ids,
        num_experts=num_experts,
        layer_ids=layer_ids,
        sequence_lengths=np.array([6]),
        labels=("a",),
    )


def counts(layer: int, num_experts: int = 4) -> CountTrace:
    return CountTrace(counts=np.ones((1, 1, num_experts), dtype=np.int64), layer_ids=(layer,))


@pytest.mark.parametrize("layer", [4096, 2_000_000_000])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("sglang", "routing"), ("sglang", "counts"), ("sglang-location", "counts"),
     ("sglang-location", "placement")],
)  # fmt: skip
def test_files_with_a_row_for_every_layer_of_the_model_take_no_giant_index(
    tmp_path: Path, name: str, kind: str, layer: int
) -> None:
    if name == "sglang":
        pytest.importorskip("torch")
    data: Any = {
        "routing": routing(layer_ids=(layer,)),
        "counts": counts(layer),
        "placement": Placement.linear(4, 2, [layer]),
    }[kind]
    writer = FORMATS[name].write
    assert writer is not None
    with pytest.raises(TraceError, match=f"layer_ids: holds {layer}, must be below 4096"):
        writer(tmp_path / "x", data)
    assert not list(tmp_path.iterdir())


def test_a_text_too_long_to_be_read_again_is_not_written(tmp_path: Path) -> None:
    writer = FORMATS["sglang-location"].write
    assert writer is not None
    with pytest.raises(TraceError, match="a row for every layer up to 4000 needs"):
        writer(tmp_path / "x.json", counts(4000, num_experts=65536))


def test_an_omni_array_of_many_empty_ranks_is_not_written(tmp_path: Path) -> None:
    ranks = (tuple(range(65536)), *[()] * 10_000)
    writer = FORMATS["omni"].write
    assert writer is not None
    with pytest.raises(TraceError, match=r"of \[10001, 1, 65536\] needs"):
        writer(tmp_path / "x.npy", Placement(num_experts=65536, layers={0: ranks}))


def test_windows_with_giant_counts_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", routing(num_experts=65536))
    options = ReadOptions(max_bytes=1 << 20)
    with pytest.raises(TraceError, match="tokens_per_window = 2: counts of 3 windows"):
        convert(
            tmp_path / "a.json",
            tmp_path / "a.npz",
            target_format="vllm",
            options=options,
            tokens_per_window=2,
        )
    with pytest.raises(TraceError, match="tokens_per_window = 0: must be at least 1"):
        convert(tmp_path / "a.json", tmp_path / "b.json", tokens_per_window=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_experts": 0}, "num_experts = 0"),
        ({"num_experts": 65537}, "num_experts = 65537"),
        ({"top_k": 0}, "top_k = 0"),
        ({"num_ranks": 0}, "num_ranks = 0"),
        ({"first_layer": -1}, "first_layer = -1"),
        ({"max_bytes": 0}, "max_bytes = 0"),
    ],
)
def test_options_of_reading_are_checked(options: dict[str, int], text: str) -> None:
    with pytest.raises(TraceError, match=rf"{text}: must be in \["):
        ReadOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.array([[[1, 1, 0]], [[0, 0, 1]]], dtype=np.int32), "omni"),
        (np.array([[[0, 2]], [[1, 3]]], dtype=np.uint8), "raw"),
        (np.array([[[5, 2]], [[1, 3]]], dtype=np.int64), "vllm"),
    ],
)
def test_an_array_is_read_once_and_never_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: Any, name: str
) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array)
    assert detect(path) == name
    read: list[int] = []
    real = safe_npz._read_exactly

    def counted(stream: Any, num_bytes: int, what: str) -> Any:
        read.append(num_bytes)
        return real(stream, num_bytes, what)

    monkeypatch.setattr(safe_npz, "_read_exactly", counted)
    open_any(path)
    convert(path, tmp_path / "b.json")
    assert read == [array.nbytes, array.nbytes]
    for use in (
        lambda: open_any(path, ReadOptions(max_bytes=3)),
        lambda: detect(path, max_bytes=3),
        lambda: convert(path, tmp_path / "c.json", options=ReadOptions(max_bytes=3)),
    ):
        with pytest.raises(TraceError, match=r"bytes, more than 3 \(max_bytes\)"):
            use()
    assert len(read) == 2


def test_an_array_of_other_than_integers_is_of_no_format(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((2, 2, 2), 0.5))
    with pytest.raises(TraceError, match="ids and counts are integers"):
        open_any(tmp_path / "a.npy")


def test_esft_logs_are_held_against_the_limit_before_they_are_read(tmp_path: Path) -> None:
    for layer in (1, 2):
        (tmp_path / f"expert_weights_{layer}.txt").write_text("1\t2\t\t0.5\t0.5\n")
    assert open_any(tmp_path, ReadOptions(top_k=2, max_bytes=100))
    with pytest.raises(TraceError, match=r"has 26 bytes of text, more than 20 \(max_bytes\)"):
        open_any(tmp_path, ReadOptions(top_k=2, max_bytes=20))


@pytest.mark.parametrize("repeated", ["0", "4999"])
def test_a_key_that_comes_twice_in_a_large_yaml_is_refused(tmp_path: Path, repeated: str) -> None:
    lines = "".join(f"  {layer}: [0, 1]\n" for layer in range(5000))
    head = "num_slots: 2\nep_size: 1\ninitial_global_assignments:\n"
    (tmp_path / "a.yaml").write_text(f"{head}{lines}  {repeated}: [1, 0]\n")
    with pytest.raises(TraceError, match=f"key '{repeated}' comes twice"):
        open_any(tmp_path / "a.yaml")


def test_keys_of_one_value_are_refused_however_they_are_written(tmp_path: Path) -> None:
    head = "num_slots: 2\nep_size: 1\ninitial_global_assignments:\n"
    (tmp_path / "a.yaml").write_text(f"{head}  1: [0, 1]\n  0x1: [1, 0]\n")
    with pytest.raises(TraceError, match="two keys of a mapping have the same value"):
        open_any(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_tokens": 10**12}, "num_tokens = 1000000000000: must be at most"),
        ({"num_layers": 10**9}, "num_layers = 1000000000: must be at most 4096"),
        ({"num_tokens": 10**7, "window_tokens": 1}, "num_tokens = 10000000: must be at most"),
        ({"num_tokens": 10**6, "num_experts": 65536}, "num_tokens = 1000000: must be at most"),
        ({"seed": -1}, "seed = -1: must be 0 or more"),
    ],
)
def test_synthetic_traces_beyond_memory_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceError, match=text):
        SynthSpec(**settings)


def test_a_mix_checks_its_seed_its_requests_and_its_rate(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="seed = -1: must be 0 or more"):
        MixSpec(seed=-1)
    for number in (0, -3, 10**12):
        with pytest.raises(TraceError, match=f"num_requests = {number}: must be in"):
            poisson_clock(number, 1.0)
        with pytest.raises(TraceError, match=f"num_requests = {number}: must be in"):
            read_clock(tmp_path / "none", limit=number)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceError, match=f"requests_per_s = {rate}: must be more than 0"):
            poisson_clock(3, rate)


def test_a_mix_of_long_sequences_is_refused_before_it_is_drawn() -> None:
    ids = np.broadcast_to(np.zeros(1, dtype=np.uint8), (200_000, 40, 1))
    trace = RoutingTrace(
        topk_ids=ids,
        num_experts=1,
        layer_ids=tuple(range(40)),
        sequence_lengths=np.array([200_000]),
        labels=("a",),
    )
    with pytest.raises(TraceError, match="num_requests = 200: their sequences have 1,600,000,000"):
        mix_under_clock(trace, np.arange(200.0))


def test_a_clock_is_read_as_far_as_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "clock.csv"
    path.write_text("TIMESTAMP,x\n1.5,0\n2.5,0\n9,0\n")
    assert read_clock(path, limit=2).tolist() == [0.0, 1.0]
    path.write_text("TIMESTAMP\n" + "9" * 200_000 + "\n")
    with pytest.raises(TraceError, match="is not CSV: field larger than field limit"):
        read_clock(path)


def test_a_single_number_is_written_as_one(tmp_path: Path) -> None:
    safe_npz.write_npz(tmp_path / "a.npz", {"a": np.array(3)})
    with np.load(io.BytesIO((tmp_path / "a.npz").read_bytes())) as found:
        assert found["a"].shape == () and int(found["a"]) == 3


def test_a_document_with_giant_numbers_is_one_error(tmp_path: Path) -> None:
    document = json.loads(Placement.linear(2, 1, [0]).to_json()) | {"num_experts": 10**4000}
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(TraceError) as caught:
        open_any(tmp_path / "p.json")
    assert len(str(caught.value)) < 400
