"""SGLang's recorder files: written and read through torch, and refused where they are not plain."""

from __future__ import annotations

import builtins
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_traces import assert_same_routing, count_traces, routing_traces
from hypothesis import given, settings

from moeserve_placement.traces import CountTrace, ReadOptions, RoutingTrace, TraceError, open_trace
from moeserve_placement.traces.sglang import parse_sglang, write_sglang

torch = pytest.importorskip("torch")


@settings(max_examples=30)
@given(trace=count_traces(max_count=2**31 - 1, min_count=1))
def test_stat_files_come_back(trace: CountTrace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expert_distribution_recorder_1.pt"
        write_sglang(path, trace)
        stored = torch.load(path, weights_only=True)
        assert stored["logical_count"].dtype == torch.int32
        assert set(stored) == {"rank", "logical_count", "average_utilization_rate_over_window"}
        found = open_trace(path)
        assert isinstance(found, CountTrace)
        np.testing.assert_array_equal(found.counts, trace.counts)
        assert found.layer_ids == trace.layer_ids


@settings(max_examples=30)
@given(trace=routing_traces())
def test_per_token_files_come_back(trace: RoutingTrace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expert_distribution_recorder_1_0.pt"
        write_sglang(path, trace)
        record = torch.load(path, weights_only=True)["records"][0]
        assert record["topk_ids_of_layer"].shape[2] == 8
        assert_same_routing(open_trace(path), trace, parts="")


def recorded() -> dict[str, Any]:
    """Three layers, the first dense; 3 physical slots of 2 experts; a prefill and a decode pass."""
    prefill = np.full((3, 4, 8), -1, np.int32)
    prefill[1:, :3, 0] = [[0, 1, 2], [2, 1, 0]]  # the fourth token is padding
    decode = np.full((3, 2, 8), -1, np.int32)
    decode[1:, :, 0] = [[2, 2], [1, 1]]
    common = {"rank": 0, "gatherer_key": "primary", "misc_objects": []}
    return {
        "records": [
            common
            | {
                "forward_pass_id": 7,
                "forward_mode": 2,
                "extend_seq_lens": None,
                "topk_ids_of_layer": decode,
                "global_physical_count": np.array([[0, 0, 0], [0, 0, 2], [0, 2, 0]]),
            },
            common
            | {
                "forward_pass_id": 6,
                "forward_mode": 1,
                "extend_seq_lens": [2, 1],
                "topk_ids_of_layer": prefill,
                "global_physical_count": np.array([[0, 0, 0], [1, 1, 1], [1, 1, 1]]),
            },
        ],
        "last_physical_to_logical_map": np.array([[0, 1, 0], [0, 1, 1], [1, 0, 0]]),
    }


def test_physical_ids_of_a_recording_become_logical_ones() -> None:
    trace = parse_sglang(recorded(), ReadOptions())
    assert isinstance(trace, RoutingTrace)
    assert trace.layer_ids == (1, 2)
    assert trace.topk_ids[:, :, 0].tolist() == [[0, 0], [1, 0], [1, 1], [1, 0], [1, 0]]
    assert trace.sequence_lengths.tolist() == [2, 1, 1, 1]
    assert trace.labels == ("extend", "extend", "decode", "decode")
    assert trace.metadata["dropped_tokens"] == "1"


def test_per_pass_records_become_counts_of_logical_experts() -> None:
    loaded = recorded()
    for record in loaded["records"]:
        del record["topk_ids_of_layer"]
    trace = parse_sglang(loaded, ReadOptions())
    assert isinstance(trace, CountTrace)
    assert trace.counts.tolist() == [[[1, 2], [2, 1]], [[0, 2], [2, 0]]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"records": []}, "not from SGLang"),
        ({"records": [1]}, "list of dicts"),
        ({"records": [{}]}, "forward_pass_id"),
        ({"records": [{"forward_pass_id": 1}]}, "global_physical_count"),
        ({"last_physical_to_logical_map": [1]}, "last_physical_to_logical_map"),
        ({"last_physical_to_logical_map": np.array([[0], [0], [0]])}, r"ids must be in \[-1, 1\)"),
    ],
)
def test_wrong_recordings_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceError, match=text):
        parse_sglang(recorded() | change, ReadOptions())


class Loud:
    """Says so when it is built from a pickle."""

    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bad.pt"
    torch.save({"logical_count": Loud()}, path)
    with pytest.raises(TraceError, match="not a torch file of plain tensors") as caught:
        open_trace(path)
    assert "\n" not in str(caught.value)
    assert "run" not in capsys.readouterr().out


def test_a_small_file_with_a_giant_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    torch.save({"logical_count": torch.zeros(1, dtype=torch.int32).expand(1 << 20, 8, 64)}, path)
    with pytest.raises(TraceError, match="a tensor has 2,147,483,648 bytes, more than"):
        open_trace(path, ReadOptions(max_bytes=1 << 20))


def test_without_torch_the_extra_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.pt"
    torch.save({"logical_count": torch.ones(1, 1, 2, dtype=torch.int32)}, path)
    real = builtins.__import__

    def no_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(TraceError, match=r"needs torch.*moeserve\[traces\]"):
        open_trace(path)
