import json
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from moeserve_placement.cli.main import LibraryGroup, main, placement_group, trace_group
from moeserve_placement.paging.reuse import MAX_EXPERTS as REUSE_LIMIT
from moeserve_placement.traces import RoutingTrace, write_trace


@pytest.fixture
def trace_file(tmp_path):
    rng = np.random.default_rng(0)
    trace = RoutingTrace(
        topk_ids=np.argsort(-rng.random((80, 3, 8)), axis=2)[:, :, :2],
        num_experts=8,
        layer_ids=(0, 1, 2),
        sequence_lengths=np.array([20, 20, 20, 20]),
        metadata={},
    )
    path = tmp_path / "small.npz"
    write_trace(path, trace)
    return path


def run(*args, group=main):
    return CliRunner().invoke(group, [str(arg) for arg in args])


def test_help_names_both_groups_and_their_commands():
    assert {"placement", "trace"} <= set(run("--help").output.split())
    assert {"plan", "compare", "explain", "paging"} <= set(placement_group.commands)
    assert {"info", "synth", "convert"} <= set(trace_group.commands)
    assert run("placement", "--help").exit_code == run("trace", "--help").exit_code == 0


def test_groups_work_alone(trace_file):
    result = run("paging", trace_file, "--capacity", "4", "--batch", "1", group=placement_group)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.write_bytes(b"not a trace at all")])
def test_bad_files_give_one_error_line_and_code_two(tmp_path, make):
    path = tmp_path / "x.npz"
    make(path)
    for command in (("placement", "paging", path, "--capacity", "4"), ("trace", "info", path)):
        result = run(*command)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_bad_settings_give_one_error_line_and_code_two(trace_file):
    result = run("placement", "paging", trace_file, "--capacity", "0")
    assert result.exit_code == 2
    assert result.stderr == "error: capacity = 0: must be at least 1\n"
    result = run("placement", "paging", trace_file, "--capacity", "a")
    assert result.exit_code == 2 and "'a' is not a list of INTEGERS" in result.stderr


def test_paging_json_has_a_row_per_policy_and_capacity(trace_file):
    result = run("placement", "paging", trace_file, "--capacity", "3,5", "--batch", "1,2", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {(row["batch"], row["capacity"]) for row in rows} == {(1, 3), (1, 5), (2, 3), (2, 5)}
    belady = [row for row in rows if row["policy"] == "belady" and not row["shared_pool"]]
    assert all(row["gap_closed"] in (1.0, None) for row in belady)


def test_paging_table_names_the_policies(trace_file):
    result = run("placement", "paging", trace_file, "--capacity", "4", "--batch", "1")
    for name in ("random", "lru", "lfu", "fast-slow", "reuse", "belady", "layer-lru", "oracle"):
        assert name in result.output


def test_paging_says_which_policy_is_left_out_for_too_many_experts(tmp_path):
    num_experts = REUSE_LIMIT + 1
    ids = np.random.default_rng(0).integers(0, num_experts, (20, 2, 1))
    trace = RoutingTrace(
        topk_ids=ids,
        num_experts=num_experts,
        layer_ids=(0, 1),
        sequence_lengths=np.array([10, 10]),
        metadata={},
    )
    write_trace(tmp_path / "wide.npz", trace)
    result = run("placement", "paging", tmp_path / "wide.npz", "--capacity", "4", "--batch", "1")
    assert result.exit_code == 0, result.output
    assert result.stderr == f"left out: reuse, {num_experts} experts a layer are too many\n"


def test_system_errors_name_the_file_and_bugs_keep_their_traceback():
    @click.group(cls=LibraryGroup)
    def group():
        pass

    @group.command()
    def missing():
        Path("/nowhere/at/all").read_text()

    @group.command()
    def lines():
        raise ValueError("two\nlines")

    @group.command()
    @click.argument("kind")
    def large(kind):
        if kind == "array":
            np.empty(1 << 56)
        elif kind == "memory":
            raise MemoryError
        float(10**400)

    @group.command()
    def colours():
        raise ValueError("bad \x1b[31mname")

    @group.command()
    def bug():
        raise KeyError("bug")

    result = run("missing", group=group)
    assert result.exit_code == 2
    assert result.stderr == "error: /nowhere/at/all: No such file or directory\n"
    assert run("lines", group=group).stderr == "error: two lines\n"
    assert isinstance(run("bug", group=group).exception, KeyError)
    assert run("colours", group=group).stderr == "error: bad \ufffd[31mname\n"
    for kind, text in (
        ("array", "Unable to allocate"),
        ("memory", "MemoryError"),
        ("overflow", "int too large to convert to float"),
    ):
        result = run("large", kind, group=group)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: too large for this machine: ")
        assert text in result.stderr


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("trace", "info", ""), "trace = '': must be the name of a file"),
        (("trace", "convert", "", "x.npz"), "source = '': must be"),
        (("trace", "synth", "zipf", ""), "target = '': must be"),
        (("placement", "explain", ""), "plan = '': must be"),
        (("placement", "paging", "", "--capacity", "4"), "trace = '': must be"),
    ],
)
def test_an_empty_name_is_not_the_present_folder(command, text):
    result = run(*command)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {text}") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--seed", "-1"), "seed = -1: must be 0 or more"),
        (("--batch", "100000000"), "batch = 100000000: must be at most 16384"),
        (("--max-bytes", "10"), "more than the limit of 10 (max_bytes)"),
        (("--first-layer", "-2"), "first_layer = -2: must be in"),
        (("--parts-per-expert", "9" * 400), "parts_per_expert = 999"),
    ],
)
def test_paging_names_the_option_that_is_wrong(trace_file, options, text):
    result = run("placement", "paging", trace_file, "--capacity", "4", *options)
    assert result.exit_code == 2 and text in result.stderr


@pytest.mark.parametrize("options", [(), ("--predictors", "oracle")])
def test_paging_of_one_layer_leaves_out_what_needs_a_next_one(tmp_path, options):
    trace = RoutingTrace(
        topk_ids=np.argsort(np.random.default_rng(0).random((40, 1, 8)), axis=2)[:, :, :2],
        num_experts=8,
        layer_ids=(0,),
        sequence_lengths=np.array([20, 20]),
    )
    write_trace(tmp_path / "one.npz", trace)
    base = ("placement", "paging", tmp_path / "one.npz", "--capacity", "4", "--batch", "1")
    result = run(*base, *options, "--json")
    assert result.exit_code == 0, result.output
    assert "left out: oracle, it needs a next layer, the trace has one\n" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert {row["predictor"] for row in rows} == {None}
    assert {"lru", "belady"} <= {row["policy"] for row in rows}
