"""From a rank's token outputs to text: what one sequence's reader gets, step by step.

Shared by the HTTP process and by offline generation; knows no transport and no clock.
"""

from __future__ import annotations

import msgspec

from moeserve.api.detokenizer import Detokenizer, StopString, first_match
from moeserve.api.tokenizer import Tokenizer
from moeserve.messages import FinishReason, SamplingParams, TokenLogprobs, TokenOutput


class OutputToken(msgspec.Struct, gc=False):
    """A token whose text is out. ``text`` is its share of the delta's text (may be "")."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


class Delta(msgspec.Struct, gc=False):
    """What became certain in one step: ``text`` is the concatenation of the tokens' texts.

    One exception: bytes that are no UTF-8, whose token is out already, may leave a U+FFFD at the
    very end. ``tokens`` is filled only for a processor made with ``with_tokens``.
    ``finish_reason`` set: the sequence has ended; ``stop_reason`` is then the stop string or stop
    token id that ended it.
    """

    text: str
    tokens: list[OutputToken]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputProcessor:
    """Detokenises one sequence, holds back what may become a stop string, ends at a stop.

    Text leaves in whole tokens, so text, token ids and logprobs of a delta always belong together.

    Args:
        tokenizer: None gives deltas without text.
        sampling: the sequence's parameters (stop strings, special tokens, min_tokens).
        with_tokens: deltas carry their tokens (needed for logprobs and token ids).
    """

    def __init__(
        self, tokenizer: Tokenizer | None, sampling: SamplingParams, *, with_tokens: bool = False
    ) -> None:
        self.token_ids: list[int] = []  # all that the rank sent, stop token and stop text included
        self.finish_reason: FinishReason | None = None
        self._sampling = sampling
        self._with_tokens = with_tokens
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(
                skip_special_tokens=sampling.skip_special_tokens
            )
        self._stops = [StopString(text) for text in dict.fromkeys(sampling.stop)]
        self._held = ""
        self._held_tokens: list[tuple[int, int, TokenLogprobs | None]] = []  # id, end in held

    def process(self, output: TokenOutput) -> Delta:
        """Takes the sequence's next output. After a delta with ``finish_reason``, no more."""
        push = self._detokenizer.push if self._detokenizer else None
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            text = push(token_id) if push and not self._is_hidden(token_id, output) else ""
            if self._with_tokens or self._stops:
                logprobs = output.logprobs[position] if output.logprobs else None
                stopped = self._take(token_id, text, logprobs)
                if stopped is not None:
                    return stopped
            else:
                self._held += text
        if output.finish_reason is not None:
            return self._finish(output)
        return self._release(self._releasable_tokens())

    def _is_hidden(self, token_id: int, output: TokenOutput) -> bool:
        """The stop token itself has no text unless asked for, special or not."""
        return token_id == output.stop_token_id and not self._sampling.include_stop_str_in_output

    def _take(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> Delta | None:
        """Holds a token; the last delta if a stop string is complete with it."""
        num_held = len(self._held)
        self._held += text
        self._held_tokens.append((token_id, num_held + len(text), logprobs))
        return self._stop_at(text, num_held) if text and self._stops else None

    def _stop_at(self, text: str, num_held: int) -> Delta | None:
        too_early = len(self.token_ids) <= self._sampling.min_tokens
        match = first_match(self._stops, text, ignore_matches=too_early)
        if match is None:
            return None
        end, stop = match
        cut = num_held + end
        if not self._sampling.include_stop_str_in_output:
            cut -= len(stop.text)
        starts = [0, *(token_end for _, token_end, _ in self._held_tokens)]
        num_tokens = sum(start < cut for start in starts[:-1])
        self._held = self._held[:cut]
        self._held_tokens = [
            (token_id, min(token_end, cut), logprobs)
            for token_id, token_end, logprobs in self._held_tokens[:num_tokens]
        ]
        delta = self._release(num_tokens)
        delta.finish_reason = self.finish_reason = "stop"
        delta.stop_reason = stop.text
        return delta

    def _finish(self, output: TokenOutput) -> Delta:
        rest = self._detokenizer.finish() if self._detokenizer else ""
        if rest and self._held_tokens:
            stopped = self._extend_last(rest)
            if stopped is not None:
                return stopped
        else:
            self._held += rest
        delta = self._release(len(self._held_tokens))
        delta.finish_reason = self.finish_reason = output.finish_reason
        if output.stop_token_id in self._sampling.stop_token_ids:
            delta.stop_reason = output.stop_token_id
        return delta

    def _extend_last(self, rest: str) -> Delta | None:
        """The unfinished character at the very end belongs to the last token that has none."""
        num_held = len(self._held)
        self._held += rest
        token_id, _, logprobs = self._held_tokens[-1]
        self._held_tokens[-1] = (token_id, len(self._held), logprobs)
        return self._stop_at(rest, num_held) if self._stops else None

    def _releasable_tokens(self) -> int:
        """How many held tokens are certain: before any possible stop, at a character's end."""
        if self._detokenizer is None:
            return len(self._held_tokens)
        if not self._held:
            return 0
        safe = len(self._held) - max((stop.num_matched for stop in self._stops), default=0)
        count = 0
        for position, (_, end, _) in enumerate(self._held_tokens, start=1):
            if end > safe:
                break
            # A token without text may be the head of a character: it leaves with the rest of it.
            start = self._held_tokens[position - 2][1] if position > 1 else 0
            if end > start:
                count = position
        return count

    def _release(self, num_tokens: int) -> Delta:
        if not self._held_tokens:
            delta = Delta(self._held, [])
            self._held = ""
            return delta
        released = self._held_tokens[:num_tokens]
        length = released[-1][1] if released else 0
        text, self._held = self._held[:length], self._held[length:]
        self._held_tokens = [
            (token_id, end - length, logprobs)
            for token_id, end, logprobs in self._held_tokens[num_tokens:]
        ]
        tokens = []
        start = 0
        for token_id, end, logprobs in released if self._with_tokens else ():
            tokens.append(OutputToken(token_id, text[start:end], logprobs))
            start = end
        return Delta(text, tokens)
