"""One engine in a process of its own: what bench_offline runs and times.

The parent writes one JSON line per task on stdin and reads one JSON line per result; the first line
says that the model is loaded. Anything that a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks import report

CONTINUOUS_PAGE_SIZE = 256


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine, on which model, how. ``args``: further arguments of moeserve's LLM."""

    kind: str
    model: str
    dtype: str
    threads: int
    ep: int = 1
    experts_implementation: str = "grouped_mm"
    args: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"{self.kind}:{self.dtype}"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to complete greedily with exactly ``output_len`` tokens each."""

    prompts: list[list[int]]
    output_len: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How long a task took, and the first new token of each prompt, to see that engines agree."""

    wall_s: float
    first_tokens: list[int]


class Engine(Protocol):
    """An engine with its model loaded."""

    def run(self, task: Task) -> Outcome:
        """Completes all prompts of ``task``, which start together."""

    def close(self) -> None:
        """Ends what the engine started."""


class Moeserve:
    """moeserve's offline API."""

    def __init__(self, spec: EngineSpec) -> None:
        from moeserve import LLM

        threads = max(1, spec.threads // spec.ep)
        settings = {"threads_per_rank": threads, "skip_tokenizer_init": True, **spec.args}
        self._llm = LLM(spec.model, ep=spec.ep, dtype=spec.dtype, **settings)

    def run(self, task: Task) -> Outcome:
        """Completes all prompts in one call of ``generate``."""
        from moeserve import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=task.output_len, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in task.prompts]
        start = time.perf_counter()
        results = self._llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - start
        return _outcome(wall_s, [list(r.outputs[0].token_ids) for r in results], task)

    def close(self) -> None:
        """Stops the ranks."""
        self._llm.shutdown()


class Generate:
    """transformers' ``generate`` on one static batch."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model = _load_transformers(spec)

    def run(self, task: Task) -> Outcome:
        """Completes the prompts, which must be equally long, as one batch."""
        import torch

        prompts = torch.tensor(task.prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            tokens = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=task.output_len,
                min_new_tokens=task.output_len,
                do_sample=False,
            )
        wall_s = time.perf_counter() - start
        return _outcome(wall_s, tokens[:, prompts.shape[1] :].tolist(), task)

    def close(self) -> None:
        """Nothing to end."""


class Continuous:
    """transformers' continuous batching. Its set-up (cache, thread) is not timed."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model = _load_transformers(spec)

    def run(self, task: Task) -> Outcome:
        """Adds all prompts at once and waits for the last one to finish."""
        with self._manager(task) as manager:
            start = time.perf_counter()
            ids = manager.add_requests(inputs=task.prompts, max_new_tokens=task.output_len)
            finished: dict[str, list[int]] = {}
            while len(finished) < len(task.prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    finished[result.request_id] = list(result.generated_tokens)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended early")
            wall_s = time.perf_counter() - start
        return _outcome(wall_s, [finished[request_id] for request_id in ids], task)

    def _manager(self, task: Task) -> Any:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        longest = max(len(prompt) for prompt in task.prompts) + task.output_len
        pages = -(-longest // CONTINUOUS_PAGE_SIZE) + 1
        return self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=task.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=CONTINUOUS_PAGE_SIZE,
                num_blocks=pages * len(task.prompts) + 8,
                max_requests_per_batch=len(task.prompts),
                max_batch_tokens=2048,
                allow_block_sharing=False,
            ),
            block=True,
            timeout=5,
            warmup=False,
        )

    def close(self) -> None:
        """Nothing to end: each task's manager has ended with it."""


ENGINES: dict[str, type[Moeserve] | type[Generate] | type[Continuous]] = {
    "moeserve": Moeserve,
    "generate": Generate,
    "continuous": Continuous,
}


def _load_transformers(spec: EngineSpec) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(spec.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        spec.model,
        dtype=getattr(torch, spec.dtype),
        experts_implementation=spec.experts_implementation,
    )
    return model.eval()


def _outcome(wall_s: float, outputs: list[list[int]], task: Task) -> Outcome:
    lengths = {len(tokens) for tokens in outputs}
    if len(outputs) != len(task.prompts) or lengths != {task.output_len}:
        raise RuntimeError(f"{len(outputs)} outputs of {lengths}, not {task.output_len} tokens")
    return Outcome(wall_s=wall_s, first_tokens=[tokens[0] for tokens in outputs])


def _serve(spec: EngineSpec, tasks: Iterator[str], out: Any) -> None:
    start = time.perf_counter()
    engine = ENGINES[spec.kind](spec)
    load_s = time.perf_counter() - start
    names = ("moeserve", "torch", "transformers")
    out.write(json.dumps({"load_s": load_s, "versions": report.versions(*names)}) + "\n")
    out.flush()
    try:
        for line in tasks:
            outcome = engine.run(msgspec.json.decode(line, type=Task))
            out.write(msgspec.json.encode(outcome).decode() + "\n")
            out.flush()
    finally:
        engine.close()


def main() -> None:
    """The child's command line: one argument, the spec as JSON."""
    spec = msgspec.json.decode(sys.argv[1], type=EngineSpec)
    if not Path(spec.model, "config.json").is_file():
        raise SystemExit(f"model = {spec.model!r}: must be a folder with a config.json")
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the results
    _serve(spec, iter(sys.stdin.readline, ""), results)


if __name__ == "__main__":
    main()
