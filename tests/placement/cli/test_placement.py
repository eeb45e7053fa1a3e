"""The commands plan, compare and explain: what they print, write and refuse."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers_replay import domain_trace

from moeserve_placement.cli import placement as placement_commands
from moeserve_placement.cli.main import LibraryGroup
from moeserve_placement.cli.placement import compare, explain, plan
from moeserve_placement.cli.placement_options import budgets, make_topology, num_bytes, planners
from moeserve_placement.placement import Placement, PlacementError
from moeserve_placement.planners.base import Budget
from moeserve_placement.report.plan_file import load_plan
from moeserve_placement.report.words import printable
from moeserve_placement.traces import write_trace
from moeserve_placement.traces.convert import convert
from moeserve_placement.traces.placement_npz import load_npz

ROUTING = Path(__file__).parents[3].parent / "shared" / "data" / "routing"
MACHINE = ("--ranks", 4, "--slots", 3)
SMALL = (*MACHINE, "--batch", 16, "--window", 32)


@click.group(cls=LibraryGroup)
def group() -> None:
    """The commands under the error handling of the real groups."""


for command in (compare, explain, plan):
    group.add_command(command)


def run(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(group, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.npz"
    write_trace(path, domain_trace())
    return path


def test_compare_prints_balance_cost_domains_and_a_verdict(trace: Path) -> None:
    output = run("compare", trace, "--planners", "eplb,scenario", *SMALL).output
    for words in (
        "trace.npz: routing of 256 tokens in 16 sequences, 2 layers, 8 experts, top-2",
        "4 ranks x 3 slots; 8 experts in 2 layers",
        "Balance: fullest / mean rank",
        "Cost: copies and time per plan",
        "Imbalance by domain",
        "scenario against eplb: imbalance",
    ):
        assert words in output
    assert "nodes/token" not in output
    assert "nodes/token" in run("compare", trace, *SMALL, "--nodes", 2).output


def test_compare_prints_json_alone(trace: Path) -> None:
    result = run("compare", trace, "--planners", "eplb", *SMALL, "--json", "-")
    found = json.loads(result.stdout)
    assert found["format"] == "moeserve-placement-comparison"
    assert found["trace"]["name"] == "trace.npz"


def test_compare_takes_other_formats_alike(trace: Path, tmp_path: Path) -> None:
    """The same tokens as our JSON, as raw arrays and as counts of the same windows."""
    data = domain_trace()
    write_trace(tmp_path / "trace.json", data)
    lengths = data.sequence_lengths
    np.savez(tmp_path / "raw.npz", ids=data.topk_ids, seqlen=lengths)
    convert(trace, tmp_path / "vllm.npz", target_format="vllm", tokens_per_window=32)
    means = set()
    for name in ("trace.npz", "trace.json", "raw.npz", "vllm.npz"):
        machine = (*MACHINE, "--batch", 32, "--window", 32)
        result = run("compare", tmp_path / name, "--planners", "eplb", *machine, "--json", "-")
        rows = json.loads(result.stdout)["balance"]
        row = next(r for r in rows if (r["label"], r["split"]) == ("eplb", "fixed"))
        means.add(round(row["mean"]["mean"], 9))
    assert len(means) == 1


def test_budgets_seeds_orders_and_starts_reach_the_replay(trace: Path, tmp_path: Path) -> None:
    options = (
        "--budget",
        "1/layer,2500B",
        "--order",
        "drift",
        "--seeds",
        "0,1",
        "--start",
        "linear",
    )
    output = run(
        "compare", trace, "--planners", "scenario", *SMALL, *options, "--expert-bytes", 1000,
        "--interval", 2, "--warmup", 1, "--json", tmp_path / "r.json",
    ).output  # fmt: skip
    assert "2 seeds; ± is half the range" in output
    found = json.loads((tmp_path / "r.json").read_text())
    labels = {row["label"] for row in found["cost"]}
    assert labels == {"linear", "scenario (1 copy/layer)", "scenario (2500B)"}
    most = max(plan["num_copies"] for run in found["runs"] for plan in run["plans"])
    assert most <= 2  # one copy for each of two layers; 2,500 bytes are two of 1,000


def test_a_report_is_written(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("compare", trace, "--planners", "eplb", *SMALL, "--report", tmp_path / "r.html")
    assert "data:image/svg+xml;base64," in (tmp_path / "r.html").read_text()


def test_plan_prints_a_placement(trace: Path) -> None:
    found = Placement.from_json(run("plan", trace, *MACHINE, "--window", 32).output)
    assert found.num_ranks == 4 and set(found.layers) == {3, 4} and found.max_slots == 3


def test_plan_from_a_placement_writes_moves_that_explain_says(trace: Path, tmp_path: Path) -> None:
    base = ("plan", trace, *MACHINE, "--window", 32)
    run(*base, "--planner", "linear", "--out", tmp_path / "now.json")
    output = run(
        *base, "--current", tmp_path / "now.json", "--budget", 3, "--out", tmp_path / "new.json",
        "--plan", tmp_path / "plan.json",
    ).output  # fmt: skip
    written = load_plan(tmp_path / "plan.json")
    assert dict(Placement.load(tmp_path / "new.json").layers) == dict(written.placement.layers)
    copies = sum(move.num_copies for move in written.moves)
    assert 1 <= copies <= 3 and f"{copies} copies" in output
    lines = run("explain", tmp_path / "plan.json").output.splitlines()
    assert lines[0].startswith("scenario: ") and sum("Why: " in x for x in lines) == len(lines) - 1
    assert len(run("explain", tmp_path / "plan.json", "--limit", 1).output.splitlines()) <= 3
    layer = written.moves[0].layer
    only = run("explain", tmp_path / "plan.json", "--layer", layer).output
    assert f"layer {layer}:" in only and f"layer {7 - layer}:" not in only


def test_plan_takes_placements_of_other_formats_and_lost_ranks(trace: Path, tmp_path: Path) -> None:
    run("plan", trace, *MACHINE, "--out", tmp_path / "now.json", "--window", 32)
    convert(tmp_path / "now.json", tmp_path / "now.yaml")
    run(
        "plan", trace, *MACHINE, "--window", 32, "--gone", 1, "--current", tmp_path / "now.yaml",
        "--out", tmp_path / "new.npz",
    )  # fmt: skip
    placement, shares = load_npz(tmp_path / "new.npz")
    assert all(ranks[1] == (None, None, None) for ranks in placement.layers.values())
    assert shares is None


def test_planned_shares_are_kept_in_the_npz(trace: Path, tmp_path: Path) -> None:
    run(
        "plan", trace, *MACHINE, "--window", 32, "--planner", "scenario:split=planned",
        "--out", tmp_path / "p.npz",
    )  # fmt: skip
    placement, shares = load_npz(tmp_path / "p.npz")
    assert shares is not None
    for row, layer in enumerate(sorted(placement.layers)):
        for expert, places in enumerate(placement.copies(layer)):
            assert sum(shares[row, r, s] for r, s in places) == pytest.approx(1.0), expert


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--planners", "magic"), "planner = 'magic': must be one of"),
        (("--planners", "scenario:power"), "option 'power' must be key=value"),
        (("--planners", "eplb,eplb"), "a planner comes twice"),
        (("--planners", "scenario:power=3"), "power = 3"),
        (("--slots", "1"), "can not hold 8 experts"),
        (("--slots", "3,3"), "slots = '3,3': must be one number or 4"),
        (("--slots", "x"), "slots = 'x': must be integers"),
        (("--ranks", "0"), "num_ranks = 0"),
        (("--nodes", "5"), "num_nodes = 5"),
        (("--gone", "4"), "ranks must be in [0, 4)"),
        (("--speeds", "1,fast"), "must be numbers separated by commas"),
        (("--speeds", "1,2"), "speed_of_rank: has 2 entries, must have 4"),
        (("--budget", "lots"), "budget = 'lots': must be none"),
        (("--budget", "4,4"), "a budget comes twice"),
        (("--batch", "24"), "batch = 24: must divide the window, 32 tokens"),
        (("--window", "512", "--batch", "512"), "256 tokens give 0 windows"),
        (("--seeds", "0,1"), "the same for every seed"),
        (("--report", "r.pdf"), "must end in .html or .png"),
        (("--report", "no/r.html"), "report = no/r.html: the folder no does not exist"),
        (("--json", "no/r.json"), "json = no/r.json: the folder no does not exist"),
        (("--token-bytes", "many"), "token_bytes = 'many': must be a size"),
        (("--token-bytes", "2GiB"), "token_bytes = 2147483648: must be at most 1073741824"),
        (("--token-bytes", "9" * 400), "token_bytes = '999"),
        (("--expert-bytes", "9" * 400), "expert_bytes = '999"),
        (("--budget", "9" * 400), "budget = '999"),
        (("--batch", "9" * 400), "batch = '999"),
        (("--ranks", "100000000"), "ranks = 100000000: must be at most 4096"),
        (("--history", "0"), "history = 0: must be at least 1"),
        (("--history", "1" + "0" * 40), "history = 1"),
        (("--seeds", "-1"), "seed = -1: must be at least 0"),
        (("--max-bytes", "10"), "more than the limit of 10 (max_bytes)"),
        (("--top-k", "0"), "top_k = 0: must be in [1, 1024]"),
        (("--first-layer", "-1"), "first_layer = -1: must be in"),
        (("--report", ""), "reports = '': must be the name of a file"),
        (("--order", "holdout", "--history", "1"), "history = 1: has no effect with order = 'ho"),
        (("--order", "holdout", "--interval", "1"), "interval = 1: has no effect with order"),
    ],
)
def test_wrong_options_give_one_line_and_exit_code_2(
    trace: Path, args: tuple[str, ...], words: str
) -> None:
    result = run("compare", trace, *SMALL, *args, code=2)
    assert result.output.startswith("error: ") and words in result.output
    assert len(result.output.splitlines()) == 1


def test_bad_files_give_one_line_and_exit_code_2(trace: Path, tmp_path: Path) -> None:
    whole = trace.read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "pickle.npz").write_bytes(b"\x80\x04K\x01.")
    (tmp_path / "empty").write_bytes(b"")
    placement = tmp_path / "placement.json"
    Placement.linear(8, 4, [0]).save(placement)
    for path in ("cut.npz", "pickle.npz", "empty", "placement.json", "missing.npz"):
        for command, options in (("compare", SMALL), ("plan", MACHINE), ("explain", ())):
            result = run(command, tmp_path / path, *options, code=2)
            assert result.output.startswith("error: ") and path in result.output
            assert len(result.output.splitlines()) == 1
    result = run("plan", trace, *MACHINE, "--current", trace, code=2)
    assert "current" in result.output or "placement" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--out", "foo.txt"), "out = foo.txt: the name must end in .json or .npz"),
        (("--out", "no/p.json"), "out = no/p.json: the folder no does not exist"),
        (("--out", ""), "out = '': must be the name of a file"),
        (("--history", "0"), "history = 0: must be at least 1"),
        (("--window", "0"), "window = 0: must be at least 1"),
        (("--budget", "3"), "budget = '3': goes with --current only"),
        (("--budget", "0"), "budget = '0': goes with --current only"),
        (("--max-bytes", "10"), "more than the limit of 10 (max_bytes)"),
    ],
)
def test_plan_refuses_wrong_options_before_it_plans(
    trace: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(placement_commands, "observe", lambda *_: pytest.fail("planned already"))
    result = run("plan", trace, *MACHINE, *args, code=2)
    assert result.output.startswith("error: ") and words in result.output
    assert len(result.output.splitlines()) == 1


def test_a_current_placement_in_npz_is_read_without_trust(trace: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    run("plan", trace, *MACHINE, "--window", 32, "--out", good)
    arrays = dict(np.load(good))
    np.savez(tmp_path / "two.npz", **(arrays | {"num_experts": np.array([8, 8])}))
    np.savez(tmp_path / "part.npz", **(arrays | {"num_experts": np.array(8.9)}))
    giant = np.zeros((2, 4096, 4200), dtype=np.int64)
    np.savez_compressed(tmp_path / "giant.npz", **(arrays | {"slots": giant}))
    np.save(tmp_path / "array.npy", arrays["slots"].astype(np.float64))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    whole = bytearray(good.read_bytes())
    for at in range(len(whole) // 4, len(whole), 97):
        whole[at] ^= 0x55
    (tmp_path / "damaged.npz").write_bytes(whole)
    for name in ("two", "part", "giant", "array", "damaged"):
        path = tmp_path / f"{name}.npz"
        result = run("plan", trace, *MACHINE, "--window", 32, "--current", path, code=2)
        assert result.output.startswith(f"error: {path}: ")
        assert len(result.output.splitlines()) == 1
    assert "stay" in run(
        "plan", trace, *MACHINE, "--window", 32, "--current", good, "--budget", 0,
        "--out", tmp_path / "new.json",
    ).output  # fmt: skip


def test_json_on_the_output_and_a_report_go_together(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "r.html"
    result = run("compare", trace, "--planners", "eplb", *SMALL, "--json", "-", "--report", report)
    assert json.loads(result.stdout)["format"] == "moeserve-placement-comparison"
    assert report.exists() and result.stderr == f"{report}: report\n"


def test_the_options_of_reading_reach_every_command(trace: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw.npz"
    np.savez(raw, ids=domain_trace().topk_ids, seqlen=domain_trace().sequence_lengths)
    reading = ("--first-layer", 5, "--num-experts", 12)
    printed = run("plan", raw, *MACHINE, "--window", 32, *reading).output
    found = Placement.from_json(printed)
    assert set(found.layers) == {5, 6} and found.num_experts == 12
    result = run("compare", raw, "--planners", "eplb", *SMALL, *reading, "--json", "-")
    assert json.loads(result.stdout)["layer_ids"] == [5, 6]


@pytest.mark.parametrize("label", ["[/x]", "[red]", "a\x1b[31mb", ":x:", "\u202eab", "$x^$"])
def test_names_from_a_trace_are_shown_as_they_are(tmp_path: Path, label: str) -> None:
    data = domain_trace()
    names = sorted(set(data.labels or ()))
    renamed = tuple(label if name == names[0] else name for name in data.labels or ())
    write_trace(tmp_path / "t.json", replace(data, labels=renamed))
    output = run("compare", tmp_path / "t.json", "--planners", "eplb", *SMALL).output
    assert "Imbalance by domain" in output
    assert printable(label) in output
    assert not any(unicodedata.category(c) in ("Cc", "Cf") for c in output.replace("\n", ""))


@pytest.mark.parametrize(
    ("text", "label", "budget"),
    [
        ("none", "none", Budget()),
        ("64", "64 copies", Budget(max_copies=64)),
        ("6/layer", "6 copies/layer", Budget(max_copies=60)),
        ("1GB", "1GB", Budget(max_bytes=10**9)),
        ("1.5 MiB/layer", "1.5 MiB/layer", Budget(max_bytes=15 * 2**20)),
        ("0", "0 copies", Budget(max_copies=0)),
    ],
)
def test_budgets_are_copies_or_bytes_for_all_or_each_layer(
    text: str, label: str, budget: Budget
) -> None:
    (found,) = budgets(text, 10)
    assert (found.label, found.budget) == (label, budget)


def test_sizes_and_planner_options_are_read() -> None:
    assert num_bytes("x", "44MB") == 44_000_000 and num_bytes("x", "1kib") == 1024
    with pytest.raises(PlacementError, match="x = '1/layer'"):
        num_bytes("x", "1/layer")
    (found,) = planners("scenario:split=batch:power=16:move_weight=0.5")
    assert found.options == {"split": "batch", "power": 16, "move_weight": 0.5}
    machine = make_topology(
        ranks=3, slots="2,3,4", nodes=1, speeds="1,1,2", gone="0", expert_bytes="8"
    )
    assert machine.slots_per_rank == (2, 3, 4) and machine.alive == (False, True, True)


@pytest.mark.skipif(not ROUTING.exists(), reason="real traces are not here (../shared/data)")
def test_counts_of_a_real_model_are_compared_with_eplb_no_worse_than_linear() -> None:
    path = ROUTING / "olmoe_mixtral_counts.npz"
    result = run(
        "compare", path, "--select", "olmoe", "--planners", "eplb,scenario", "--ranks", 8,
        "--slots", 9, "--json", "-",
    )  # fmt: skip
    rows = json.loads(result.stdout)["balance"]
    means = {r["label"]: r["mean"]["mean"] for r in rows if r["split"] == "fixed"}
    assert means["eplb"] < means["linear"] and means["scenario"] < means["linear"]
