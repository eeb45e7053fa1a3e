"""Token ids to text, one at a time, and the search for stop strings in that text.

Two detokenizers behind one protocol. ``ByteDetokenizer`` serves byte-level tokenizers (GPT-2,
Llama-3, Qwen): a table of bytes per token and an incremental UTF-8 decoder, so the pieces add up
to the decoding of the whole. ``PrefixDetokenizer`` serves every other decoder by decoding a short
window again; it holds text back while it ends inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16  # no character is longer; beyond it the bytes are simply not UTF-8


class Detokenizer(Protocol):
    """Takes one sequence's tokens in order."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; "" inside a character."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD if the tokens end inside a character, else ""."""
        ...


class ByteTable:
    """The bytes of every token of a byte-level tokenizer.

    Args:
        vocab: token text (in the byte-level alphabet) by token id.
        special_ids: tokens that ``skip_special_tokens`` leaves out.
    """

    def __init__(self, vocab: dict[int, str], special_ids: frozenset[int]) -> None:
        size = max(vocab, default=-1) + 1
        self.all = [token_bytes(vocab[i]) if i in vocab else b"" for i in range(size)]
        self.shown = [b"" if i in special_ids else data for i, data in enumerate(self.all)]


class ByteDetokenizer:
    """Exact and quick: concatenated pieces equal the decoding of all tokens at once."""

    def __init__(self, table: ByteTable, *, skip_special_tokens: bool) -> None:
        self._bytes = table.shown if skip_special_tokens else table.all
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """See ``Detokenizer.push``. Ids that name no token have no text."""
        return self._decode(self._bytes[token_id]) if token_id < len(self._bytes) else ""

    def finish(self) -> str:
        """See ``Detokenizer.finish``."""
        return self._decode(b"", True)


class PrefixDetokenizer:
    """For any decoder: new text = decoding of a window with the new token minus without it.

    The window starts one settled piece back, because decoders treat the first token differently
    (a leading space is stripped, say).
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._settled = 0  # tokens of the window whose text is out
        self._settled_text = ""

    def push(self, token_id: int) -> str:
        """See ``Detokenizer.push``."""
        self._ids.append(token_id)
        text = self._decode()
        is_partial = text.endswith(_REPLACEMENT)
        if is_partial and len(self._ids) - self._settled < _MAX_HELD_TOKENS:
            return ""
        return self._settle(text)

    def finish(self) -> str:
        """See ``Detokenizer.finish``."""
        return self._settle(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def _settle(self, text: str) -> str:
        piece = text[len(self._settled_text) :]
        if piece:  # tokens without text stay in the window: the next one needs a neighbour
            self._ids = self._ids[self._settled :]
            self._settled_text = self._decode()
        self._settled = len(self._ids)
        return piece


class StopString:
    """One stop string, searched for character by character (Knuth-Morris-Pratt).

    The place of a match depends on the text alone, never on how tokens cut it into pieces.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0  # characters of ``text`` that the input ends with
        self._fallback = _fallback_table(text)

    def advance(self, piece: str, *, ignore_matches: bool = False) -> int | None:
        """Reads ``piece``. The offset in it just after the first whole match, or None."""
        state, text = self.num_matched, self.text
        if state == 0 and text[0] not in piece:
            return None
        for offset, character in enumerate(piece, start=1):
            while state and (state == len(text) or text[state] != character):
                state = self._fallback[state]
            if text[state] == character:
                state += 1
            if state == len(text) and not ignore_matches:
                self.num_matched = state
                return offset
        self.num_matched = self._fallback[state] if state == len(text) else state
        return None


def _fallback_table(text: str) -> list[int]:
    """``table[n]``: length of the longest proper prefix of ``text`` that ends ``text[:n]``."""
    table = [0, 0]
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = table[length]
        if text[length] == character:
            length += 1
        table.append(length)
    return table


def first_match(
    stops: Sequence[StopString], piece: str, *, ignore_matches: bool
) -> tuple[int, StopString] | None:
    """Reads ``piece`` into all ``stops``: the match that ends first (the longer one of two)."""
    best: tuple[int, StopString] | None = None
    for stop in stops:
        end = stop.advance(piece, ignore_matches=ignore_matches)
        if end is None:
            continue
        if best is None or (end, -len(stop.text)) < (best[0], -len(best[1].text)):
            best = (end, stop)
    return best


def token_bytes(token: str) -> bytes:
    """The bytes that a token of the byte-level alphabet stands for (others: their UTF-8)."""
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_level_alphabet() -> dict[int, int]:
    """Code point -> byte, GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {256 + i: byte for i, byte in enumerate(others)}


# Latin-1 characters outside the alphabet are sent where encode("latin-1") fails.
_TO_LATIN1 = dict.fromkeys(range(256), 0x10FFFF) | _byte_level_alphabet()
