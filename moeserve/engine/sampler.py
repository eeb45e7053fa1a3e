"""Logits to token ids and logprobs.

Every row stands for itself: what a request gets depends on its logits, its parameters, its seed and
the place in its output, never on the other rows of the batch. See ``draw`` for how that is kept.

Shapes: L rows of logits, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from moeserve.engine.draw import draw
from moeserve.engine.logits_edits import edit_row, needs_edits
from moeserve.engine.logprobs import token_logprobs
from moeserve.engine.plan import Sampled, SamplingInfo
from moeserve.messages import SamplingParams, TokenLogprobs

_T = TypeVar("_T")


class Sampler:
    """Chooses tokens; keeps no state.

    Args:
        max_elements: bound of rows x V worked on at a time; each takes some 50 bytes meanwhile.
    """

    def __init__(self, max_elements: int = 1 << 21) -> None:
        self._max_elements = max_elements

    def sample(self, logits: torch.Tensor, sampling: Sequence[SamplingInfo]) -> list[Sampled]:
        """One result for each of ``sampling``.

        Args:
            logits: float32 [L, V], the rows of each of ``sampling`` one after the other; they are
                not changed.
            sampling: of the step's plan.

        Raises:
            ValueError: L is not the number of rows that ``sampling`` speaks of.
        """
        num_rows = sum(info.num_rows for info in sampling)
        if logits.shape[0] != num_rows:
            raise ValueError(f"logits: {logits.shape[0]} rows, must be {num_rows} as planned")
        token_ids = iter(self._choose(logits, sampling))
        chosen = [next(token_ids) if info.is_sampled else None for info in sampling]
        if all(info.params.logprobs is None and not info.prompt_targets for info in sampling):
            return [Sampled(token_id) for token_id in chosen]
        return self._with_logprobs(logits, sampling, chosen)

    def _choose(self, logits: torch.Tensor, sampling: Sequence[SamplingInfo]) -> list[int]:
        """The tokens of those that want one."""
        ends = [0]
        for info in sampling:
            ends.append(ends[-1] + info.num_rows)
        infos = [info for info in sampling if info.is_sampled]
        rows = [end - 1 for end, info in zip(ends[1:], sampling, strict=True) if info.is_sampled]
        if not rows:
            return []
        wanted = logits if len(rows) == logits.shape[0] else logits[rows]
        token_ids = wanted.argmax(dim=-1)  # [rows], the lower id among equals
        special = [i for i, info in enumerate(infos) if not _is_plain_greedy(info)]
        for part in self._parts(special, logits.shape[1]):
            token_ids[part] = _choose_special(wanted[part], [infos[i] for i in part])
        result: list[int] = token_ids.tolist()
        return result

    def _with_logprobs(
        self,
        logits: torch.Tensor,
        sampling: Sequence[SamplingInfo],
        chosen: Sequence[int | None],
    ) -> list[Sampled]:
        wanted: list[tuple[int, int, int]] = []  # row, token id, number of best alternatives
        first = 0
        for info, token_id in zip(sampling, chosen, strict=True):
            num_top = info.params.prompt_logprobs
            if num_top is not None:
                wanted += [(first + i, t, num_top) for i, t in enumerate(info.prompt_targets)]
            first += info.num_rows
            if token_id is not None and info.params.logprobs is not None:
                wanted.append((first - 1, token_id, info.params.logprobs))
        scored: list[TokenLogprobs] = []
        for part in self._parts(wanted, logits.shape[1]):
            rows, targets, num_top_each = zip(*part, strict=True)
            scored += token_logprobs(logits[list(rows)], targets, num_top_each)
        return _in_order(sampling, chosen, iter(scored))

    def _parts(self, items: Sequence[_T], vocab_size: int) -> Iterator[Sequence[_T]]:
        size = max(1, self._max_elements // vocab_size)
        for start in range(0, len(items), size):
            yield items[start : start + size]


def _in_order(
    sampling: Sequence[SamplingInfo],
    chosen: Sequence[int | None],
    scored: Iterator[TokenLogprobs],
) -> list[Sampled]:
    results = []
    for info, token_id in zip(sampling, chosen, strict=True):
        of_prompt = tuple(next(scored) for _ in info.prompt_targets)
        has_logprobs = token_id is not None and info.params.logprobs is not None
        results.append(Sampled(token_id, next(scored) if has_logprobs else None, of_prompt))
    return results


def _choose_special(logits: torch.Tensor, infos: Sequence[SamplingInfo]) -> torch.Tensor:
    """Tokens of rows that are edited, drawn at random, or both; int64 [rows].

    logits: float32 [rows, V], a copy.
    """
    limit = torch.finfo(torch.float32).max
    # Finite from here on: -inf then means banned, and a row is never banned as a whole.
    logits.nan_to_num_(nan=-limit, neginf=-limit, posinf=limit)
    for row, info in zip(logits, infos, strict=True):
        if needs_edits(info):
            edit_row(row, info)
    token_ids = logits.argmax(dim=-1)
    random = [i for i, info in enumerate(infos) if not _is_greedy(info.params)]
    if random:
        token_ids[random] = draw(logits[random], [infos[i] for i in random])
    return token_ids


def _is_greedy(params: SamplingParams) -> bool:
    """Whether only the best token can come out; the filters always leave that one."""
    return params.temperature == 0.0 or params.top_p == 0.0 or params.top_k == 1


def _is_plain_greedy(info: SamplingInfo) -> bool:
    return _is_greedy(info.params) and not needs_edits(info)
