"""Prompts, parameters and exact results for tests that compare texts bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moeserve import LLM, SamplingParams

NUM_EXPERTS, LAYERS = 16, range(8)  # of the embedded model
MAX_TOKENS = 24

Result = tuple[list[int], list[float], str]


def prompts() -> list[list[int]]:
    """Token ids of several lengths; some share a long prefix."""
    rng = random.Random(7)
    shared = [rng.randrange(3, 4096) for _ in range(70)]
    alone = [[rng.randrange(3, 4096) for _ in range(n)] for n in (1, 5, 16, 33, 150)]
    return [*alone, [*shared, 5, 6, 7], [*shared, 9], shared[:64]]


PARAMS = SamplingParams(
    temperature=0.8, seed=11, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True
)
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True)


def exact_results(llm: LLM, batch: Sequence[list[int]]) -> list[Result]:
    """Token ids, logprobs and text of each prompt, greedy and seeded in turn."""
    results: list[Result] = []
    params = [GREEDY if len(prompt) % 2 else PARAMS for prompt in batch]
    for output in llm.generate(
        [{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False
    ):
        [choice] = output.outputs
        assert choice.logprobs is not None
        numbers = [x for lp in choice.logprobs for x in (lp.logprob, *lp.top_logprobs)]
        results.append((choice.token_ids, numbers, choice.text))
    return results
