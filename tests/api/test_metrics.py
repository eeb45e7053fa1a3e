"""Metrics: vLLM's names, the right counts, and nothing that can raise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from moeserve.metrics import Histogram, Metrics, balancedness

from .conftest import Instance, eventually

VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "engine_healthy",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
}


def scrape(instance: Instance) -> dict[str, dict[tuple[str, ...], float]]:
    """Value by sample name and label values (without the model's name)."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    with instance.client() as client:
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found.setdefault(sample.name, {})[tuple(sorted(labels.values()))] = sample.value
    return found


def test_vllm_names(start: Callable[..., Instance]) -> None:
    instance = start(metrics_prefix="vllm")
    instance.complete()
    with instance.client() as client:
        families = {f.name for f in text_string_to_metric_families(client.get("/metrics").text)}
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= families
    assert {"http_requests", "http_request_duration_seconds"} <= families
    assert {"vllm:moe_rank_tokens", "vllm:moe_dispatches", "vllm:moe_balancedness"} <= families


def test_counts(start: Callable[..., Instance]) -> None:
    instance = start()
    assert instance.complete(prompt=[[7, 8, 9], [7]], n=3, max_tokens=5).status_code == 200
    assert instance.complete(max_tokens=0, echo=True).status_code == 200
    metrics = scrape(instance)

    def value(name: str, *labels: str) -> float:
        return metrics[f"moeserve:{name}"][labels]

    assert value("prompt_tokens_total", "0") == 3 + 1 + 2
    assert value("generation_tokens_total", "0") == 30
    assert value("request_success_total", "0", "length") == 7
    assert value("request_params_n_count", "0") == 3  # two prompts count as two
    assert value("request_params_n_sum", "0") == 3 + 3 + 1
    assert value("request_prompt_tokens_sum", "0") == 6
    assert value("request_params_max_tokens_sum", "0") == 10
    assert value("time_to_first_token_seconds_count", "0") == 6
    assert value("inter_token_latency_seconds_count", "0") == 24
    assert value("e2e_request_latency_seconds_count", "0") == 7
    for phase in ("queue", "prefill", "decode", "inference"):
        assert value(f"request_{phase}_time_seconds_count", "0") == 6
    assert value("request_inference_time_seconds_sum", "0") == pytest.approx(
        value("request_prefill_time_seconds_sum", "0")
        + value("request_decode_time_seconds_sum", "0")
    )
    assert value("moe_rank_tokens_total", "0") == 30
    assert value("kv_cache_usage_perc", "0") == 0.25
    assert value("engine_healthy", "0") == 1
    assert value("moe_balancedness") == 1
    assert metrics["moeserve:cache_config_info"] == {("16", "64"): 1.0}
    assert metrics["http_requests_total"][("/v1/completions", "2xx", "POST")] == 2


def test_aborts_are_counted_apart(start: Callable[..., Instance]) -> None:
    instance = start(stub={"delay_s": 0.01})
    with pytest.raises(httpx.ReadTimeout), instance.client() as client:
        client.post("/v1/completions", json={"prompt": [9], "max_tokens": 900}, timeout=0.3)

    def aborted() -> bool:
        return ("0", "abort") in scrape(instance).get("moeserve:request_success_total", {})

    eventually(aborted)


def test_labels_are_bounded(server: Instance) -> None:
    with server.client() as client:
        for i in range(20):
            client.get(f"/made/up/{i}")
            client.request(f"X{i}", "/health")
            client.get(f"/v1/models/nothing{i}")
    handlers = {labels[0] for labels in scrape(server)["http_requests_total"]}
    assert len(handlers) < 20
    assert all("made" not in handler for handler in handlers)


def _snapshot(**fields: Any) -> Any:
    names = ("num_running", "num_waiting", "num_preemptions", "prefix_cache_queries")
    more = ("prefix_cache_hits", "iteration_tokens", "rank_tokens", "kv_usage")
    base = dict.fromkeys((*names, *more), 0) | {"rank": 0, "dispatches": {}}
    return SimpleNamespace(**{**base, **fields})


@given(values=st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_counters_never_fall(values: list[int]) -> None:
    metrics = Metrics(prefix="m", model_name="x")
    seen = 0.0
    for value in values:
        metrics.set_snapshot(_snapshot(num_preemptions=value))
        text = metrics.render().decode()
        line = next(x for x in text.splitlines() if x.startswith("m:num_preemptions_total{"))
        assert float(line.split()[-1]) >= seen
        seen = float(line.split()[-1])


def test_an_empty_process_renders() -> None:
    text = Metrics(prefix="m", model_name='odd "name"\n').render().decode()
    assert list(text_string_to_metric_families(text))


@given(values=st.lists(st.floats(0, 1e9)))
def test_histogram(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    for label, count in histogram.buckets():
        assert count == sum(value <= float(label) for value in values)
    assert histogram.total == pytest.approx(sum(values))


def test_balancedness() -> None:
    assert balancedness([]) == balancedness([0, 0]) == balancedness([3, 3]) == 1.0
    assert balancedness([1, 3]) == pytest.approx(2 / 3)
