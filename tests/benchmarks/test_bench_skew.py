"""bench_skew: its arithmetic against hand numbers, its workloads, and a run on a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import bench_skew, skew_cells, skew_measure, skew_workloads
from benchmarks.load import Cell, Target
from benchmarks.skew_measure import Sample, SkewError
from benchmarks.skew_server import Watched
from benchmarks.sse_client import Address, Reply, decode_stream
from moeserve.cli.main import main as cli
from moeserve.model.layers.forced_router import ForcedRouting, make_routing

ADDRESS = Address.parse("http://127.0.0.1:1")


def routing(workload: str) -> ForcedRouting:
    """On the embedded model's shape, two ranks."""
    return make_routing(workload, layers=tuple(range(8)), num_experts=16, top_k=2, num_ranks=2)


class Load:
    """Counters as ranks would have them under a forced routing, ``tokens`` a step on each rank."""

    def __init__(self, forced: ForcedRouting, tokens: int = 64) -> None:
        self.forced = forced
        self.tokens = tokens
        self.steps = 0
        self.counts = np.zeros(forced.chances.shape[1:])
        self.compute_s = np.zeros(2)

    def step(self, num_steps: int) -> Load:
        """So many steps more; a pair takes a microsecond to compute."""
        for _ in range(num_steps):
            chances = self.forced.chances[self.forced.phase(self.steps)]
            self.counts = self.counts + 2 * self.tokens * chances
            self.compute_s += 2 * self.tokens * chances.reshape(8, 2, 8).sum((0, 2)) * 1e-6
            self.steps += 1
        return self

    def answer(self) -> dict[str, Any]:
        """What /experts/load says."""
        pairs = self.counts.reshape(8, 2, 8).sum(2).T
        return {
            "layers": dict(zip(map(str, range(8)), self.counts.tolist(), strict=True)),
            "ranks": [
                {
                    "pairs": pairs[rank].tolist(),
                    "routed": self.counts.sum() / 2,
                    "compute_s": self.compute_s[rank],
                    "steps": self.steps,
                }
                for rank in range(2)
            ],
        }

    def sample(self) -> Sample:
        """A snapshot of now; a step takes 10 ms."""
        return Sample.parse(self.steps / 100, self.answer())


def windows_of(workload: str, *lengths: int) -> list[skew_measure.Window]:
    """Windows of so many steps each."""
    load = Load(routing(workload))
    return skew_measure.windows([load.sample(), *(load.step(n).sample() for n in lengths)])


def test_windows_too_short_to_compare_ranks_are_joined() -> None:
    found = windows_of("balanced", 10, 2, 3, 4, 10)
    assert [window.steps for window in found] == [10, 9, 10]
    assert [(window.first, window.last) for window in found] == [(0, 10), (10, 19), (19, 29)]


def test_a_rank_that_answers_a_step_later_does_not_look_busier() -> None:
    start, end = Load(routing("balanced")).sample(), Load(routing("balanced")).step(10).sample()
    late = Load(routing("balanced")).step(11).sample()
    mixed = Sample(
        time_s=0.1,
        counts=end.counts,
        pairs=np.stack([end.pairs[0], late.pairs[1]]),
        routed=end.routed,
        compute_s=np.array([end.compute_s[0], late.compute_s[1]]),
        steps=np.array([10, 11]),
    )
    [window] = skew_measure.windows([start, mixed])
    assert skew_measure.balancedness(window.pairs.T) == pytest.approx(1)
    assert window.lost_s == pytest.approx(0)


def test_time_lost_is_what_the_mean_rank_waits() -> None:
    found = windows_of("hot-rank", 50, 50)
    cost = skew_measure.Cost.of(found, wall_s=1.0)
    pairs = 100 * 64 * 2 * 2 * 8  # all on one of two ranks
    assert cost.lost_s == pytest.approx(pairs / 2 * 1e-6)
    assert cost.floor_factor == pytest.approx(1 / (1 - cost.lost_s))
    assert cost.steps == 100
    assert skew_measure.computed_balancedness(found) == 0.5


@pytest.mark.parametrize("workload", ["balanced", "zipf:1.2", "hot-rank:0.8", "rotating:20"])
def test_the_asked_load_passes(workload: str) -> None:
    found = windows_of(workload, *[10] * 8)
    skew_measure.check(routing(workload), found, tolerance=1e-6, is_static=True)


@pytest.mark.parametrize("shown", ["balanced", "zipf:1.2", "hot-rank:0.9"])
def test_another_load_fails_with_both_figures(shown: str) -> None:
    with pytest.raises(SkewError, match=r"hot-rank.*asked for 0\.500, measured 0\.\d|measured 1"):
        skew_measure.check(
            routing("hot-rank"), windows_of(shown, 20), tolerance=0.05, is_static=True
        )


def test_moved_experts_change_what_is_computed_not_what_is_asked() -> None:
    [window] = windows_of("hot-rank", 20)
    even = np.full_like(window.pairs, window.pairs.mean())
    spread = [skew_measure.Window(**{**_fields(window), "pairs": even})]
    skew_measure.check(routing("hot-rank"), spread, tolerance=0.01, is_static=False)
    with pytest.raises(SkewError, match="computed"):
        skew_measure.check(routing("hot-rank"), spread, tolerance=0.01, is_static=True)


def _fields(window: skew_measure.Window) -> dict[str, Any]:
    return {name: getattr(window, name) for name in skew_measure.Window.__dataclass_fields__}


def test_windows_across_a_change_of_phase_do_not_count() -> None:
    found = windows_of("rotating:20", 15, 10, 15, 60)
    shown = skew_measure.measured(routing("rotating:20"), found)
    assert {phase: balance.ranks for phase, balance in shown.items()} == {0: 0.5, 1: 0.5}
    with pytest.raises(SkewError, match="no snapshot lies within a span of 20 steps"):
        skew_measure.check(
            routing("rotating:20"), windows_of("rotating:20", 30), tolerance=0.1, is_static=True
        )


def test_requests_on_the_wrong_ranks_fail() -> None:
    found = windows_of("balanced", 20)
    skew_measure.check_sources(found, 1.0, tolerance=0.05)
    with pytest.raises(SkewError, match=r"asked for 0\.667, measured 1\.000"):
        skew_measure.check_sources(found, 2 / 3, tolerance=0.15)


def test_moves_count_what_took_effect() -> None:
    entry = {"time": 5.0, "state": "done", "num_groups": 4, "num_groups_done": 4}
    entry |= {"num_copies": 8, "num_bytes": 80}
    half = {**entry, "time": 9.0, "state": "failed", "num_groups_done": 2}
    empty = {**entry, "state": "declined", "num_groups": 0, "num_copies": 0, "num_bytes": 0}
    history = {"entries": [half, entry, empty]}
    assert skew_measure.moved(history) == {
        "plans": 1, "declined": 1, "failed": 1, "experts": 12, "bytes": 120,
    }  # fmt: skip
    assert skew_measure.moved(history, 6.0)["bytes"] == 40


# --- workloads ---

TARGET = Target(address=ADDRESS, endpoint="completions", model="m", vocab_size=4096)


def test_ragged_sources_keep_three_quarters_on_half_of_the_ranks() -> None:
    cell = Cell(concurrency=32, num_prompts=64, input_len=8, output_len=4)
    many, single = skew_workloads.ragged(TARGET, cell, 4, "s")
    bodies = [json.loads(body) for body in many.bodies]
    assert (many.concurrency, [body["n"] for body in bodies]) == (2, [12] * 4)
    assert (single.concurrency, len(single.bodies)) == (8, 16)
    assert skew_workloads.source_balancedness(32, 4) == pytest.approx(8 / 12)
    with pytest.raises(ValueError, match="ragged-sources: concurrency = 3"):
        skew_workloads.check_ragged(3, 2)


def test_natural_prompts_are_of_one_domain_then_of_the_other() -> None:
    cell = Cell(concurrency=4, num_prompts=8, input_len=16, output_len=4)
    [stream] = skew_workloads.domains(TARGET, cell, 2, "s")
    known = json.loads(skew_workloads.SAMPLES.read_text())["domains"]
    for index, body in enumerate(stream.bodies):
        prompt = json.loads(body)["prompt"]
        windows = known[skew_workloads.DOMAINS[index // 4]]["windows"]
        assert len(prompt) == 16
        assert any(
            prompt == window[i : i + 16] for window in windows for i in range(len(window) - 15)
        )


def test_gaps_of_several_samples_are_those_of_each() -> None:
    events = [{"choices": [{"index": i % 2, "text": "a", "finish_reason": None}]} for i in range(6)]
    pieces = [(float(t), f"data: {json.dumps(e)}\n\n".encode()) for t, e in enumerate(events)]
    timing = decode_stream(Reply(sent=-1.0, status=200, pieces=pieces))
    assert (timing.ttft_s, timing.itl_s, timing.num_chunks) == (1.0, (2.0,) * 4, 6)


# --- the command line, and a run on a fake server ---


def plan(*arguments: str) -> skew_cells.Plan:
    """The plan that a command line makes."""
    return bench_skew.plan_of(bench_skew.parser().parse_args(arguments))


def test_command_line_makes_servers() -> None:
    made = plan("--quick", "--planners", "off,eplb", "--workloads", "rotating,natural")
    rotating, natural = made.workloads
    assert made.spare == 4  # a quarter of 16 experts
    off, eplb = (shlex.join(made.arguments(rotating, planner)) for planner in made.planners)
    assert "--force-routing rotating:64" in off and "--enable-eplb" not in off
    assert "--enable-eplb --planner eplb" in eplb
    assert "--force-routing" not in made.arguments(natural, "off")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--workloads", "warm"], "workloads = 'warm': must be among balanced"),
        (["--planners", "best"], "planners = 'best': must be among off"),
        (["--workloads", "ragged-sources", "--concurrency", "2"], "concurrency = 2"),
        (["--workloads", "empty-rank", "--ep", "1"], "force_routing = 'empty-rank'"),
    ],
)
def test_what_can_not_be_is_refused_before_any_server_starts(
    arguments: list[str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        plan(*arguments)


def use_fake(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str] | None = None
) -> None:
    """Servers are fakes that do as --force-routing says, or what ``wrong`` has instead."""

    @contextlib.asynccontextmanager
    async def watched(arguments: list[str], **_options: Any) -> AsyncIterator[Watched]:
        workload = arguments[arguments.index("--force-routing") + 1]
        load = Load(routing((wrong or {}).get(workload, workload)))

        class Server(fake.FakeServer):  # type: ignore[misc,name-defined]
            async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
                if path == "/experts/load":
                    return fake._plain(writer, 200, load.step(10).answer())
                if path == "/experts/history":
                    answer = {"entries": [], "expert_share": 0.5}
                    return fake._plain(writer, 200, answer)
                await super()._answer(path, body, writer)

        async with await Server().start() as server:
            port = server.sockets[0].getsockname()[1]
            yield Watched(address=Address.parse(f"http://127.0.0.1:{port}"))

    monkeypatch.setattr(skew_cells, "watched_server", watched)


ARGUMENTS = (
    "--workloads", "balanced,hot-rank", "--planners", "off", "--concurrency", "2,4",
    "--repetitions", "2", "--output-len", "3", "--settle", "0.1",
)  # fmt: skip


def test_a_run_gives_a_line_a_cell_and_a_page(
    fake: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_fake(fake, monkeypatch)
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    assert bench_skew.main([*ARGUMENTS, "--json-out", str(out), "--report", str(page)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["workload"], r["concurrency"]) for r in records] == [
        ("balanced", 2), ("balanced", 4), ("hot-rank", 2), ("hot-rank", 4),
    ]  # fmt: skip
    hot = records[3]
    assert (hot["balancedness_asked"], hot["balancedness_computed"]) == (0.5, 0.5)
    assert hot["floor_tokens_per_s"] > hot["output_tokens_per_s"] > 0
    assert hot["lost_ms_per_step"] > records[1]["lost_ms_per_step"] == 0
    assert records[1]["share_of_balanced"] == 1
    assert (hot["num_ok"], hot["repetitions"]) == (16, 2)
    assert {"commit", "hardware", "versions", "ttft_ms", "itl_ms", "moves"} <= hot.keys()
    text = page.read_text()
    assert "data:image/svg+xml;base64," in text and "http" not in text.split("base64,")[0]
    assert "hot-rank" in text
    assert "Load skew" in capsys.readouterr().err


def test_a_server_that_does_not_do_as_told_fails_the_run(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake(fake, monkeypatch, wrong={"hot-rank": "balanced"})
    assert bench_skew.main(ARGUMENTS) == 1
    assert "asked for 0.500, measured 1.000" in capsys.readouterr().err


def test_the_page_may_be_a_picture(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_fake(fake, monkeypatch)
    page = tmp_path / "page.png"
    few = ["--concurrency", "2", "--repetitions", "1", "--report", str(page)]
    assert bench_skew.main([*ARGUMENTS, *few]) == 0
    assert page.read_bytes().startswith(b"\x89PNG")


def test_report_names_are_checked_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_skew.main(["--report", "page.pdf"]) == 1
    assert "must end in .html or .png" in capsys.readouterr().err


def test_the_moeserve_command_passes_its_arguments_on() -> None:
    result = CliRunner().invoke(cli, ["bench", "skew", "--quick", "--workloads", "warm"])
    assert (result.exit_code, "must be among balanced" in result.output) == (1, True)


def test_phases_that_are_alike_are_judged_together() -> None:
    found = windows_of("burst:20", *[20] * 4)
    assert list(skew_measure.measured(routing("burst:20"), found)) == [0, 3]
    skew_measure.check(routing("burst:20"), found, tolerance=0.01, is_static=True)


@pytest.mark.slow
def test_a_real_server_has_the_load_that_is_forced(tmp_path: Path) -> None:
    made = plan(
        *("--workloads", "hot-rank", "--planners", "off", "--concurrency", "8"),
        *("--repetitions", "1", "--output-len", "12", "--settle", "0.1"),
        *("--server-log", str(tmp_path / "log")),
    )
    records, _ = asyncio.run(bench_skew.bench(made))
    [hot] = records
    assert hot["balancedness_computed"] == pytest.approx(0.5, abs=0.02)
    assert hot["num_errors"] == 0
