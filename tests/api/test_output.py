"""Tokens to text: incremental against whole, stop strings against a search in the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from moeserve.api.detokenizer import PrefixDetokenizer, StopString, first_match, token_bytes
from moeserve.api.output import Delta, OutputProcessor
from moeserve.api.tokenizer import Tokenizer
from moeserve.messages import FinishReason, SamplingParams, TokenLogprobs, TokenOutput


def _run(
    tokenizer: Tokenizer | None,
    chunks: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    reason: FinishReason = "length",
    stop_token_id: int | None = None,
) -> list[Delta]:
    """The deltas of a sequence whose outputs have these token ids."""
    processor = OutputProcessor(tokenizer, params, with_tokens=True)
    deltas = []
    for position, ids in enumerate(chunks):
        is_last = position == len(chunks) - 1
        output = TokenOutput(
            "r",
            list(ids),
            finish_reason=reason if is_last else None,
            stop_token_id=stop_token_id if is_last else None,
            logprobs=[TokenLogprobs(i, -1.0, 1, [i], [-1.0]) for i in ids],
        )
        deltas.append(processor.process(output))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def _cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The oracle: ``text`` up to the stop string that is complete first."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def _chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(ids[at : at + size])
        at += size
    return [*chunks, ids[at:]]


# Byte tokens of the embedded vocabulary make every kind of broken UTF-8.
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_stream_equals_whole_text_cut_at_the_stop(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    byte_ids = [tokenizer.encode(chr(c))[0] for c in range(97, 103)]
    partial = [i for i in range(300) if tokenizer.token_text(i).startswith("bytes:")]
    pick = st.one_of(
        st.sampled_from(byte_ids),
        st.sampled_from(partial),
        st.integers(0, tokenizer.vocab_size - 1),
    )
    ids = data.draw(st.lists(pick, max_size=40))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    pieces = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda at: st.integers(1, 6).map(lambda size: whole[at : at + size])
    )
    made_up = st.text("abcdef\ufffd", min_size=1, max_size=4)
    stops = data.draw(st.lists(st.one_of(pieces, made_up).filter(bool), max_size=3))
    include = data.draw(st.booleans())
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip, max_tokens=99
    )
    deltas = _run(tokenizer, _chunked(ids, data.draw(st.lists(st.integers(0, 3)))), params)
    expected, stop = _cut(whole, stops, include)
    assert "".join(d.text for d in deltas) == expected
    assert deltas[-1].finish_reason == ("length" if stop is None else "stop")
    if stop is not None:
        assert deltas[-1].stop_reason in stops
    for delta in deltas:
        of_tokens = "".join(token.text for token in delta.tokens)
        assert delta.text.removeprefix(of_tokens) in ("", "\ufffd")  # see Delta
        assert all(t.logprobs and t.logprobs.token_id == t.token_id for t in delta.tokens)
    sent = [token.token_id for delta in deltas for token in delta.tokens]
    assert sent == ids[: len(sent)]
    if stop is None:
        assert sent == ids
        for delta in deltas:  # each chunk stands on its own
            own = [token.token_id for token in delta.tokens]
            alone = tokenizer.decode(own, skip_special_tokens=skip)
            assert delta.text == alone or "\ufffd" in delta.text + alone


def test_no_replacement_character_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = _bytes(tokenizer, "a🔥é漢z".encode())
    deltas = _run(tokenizer, [[i] for i in ids], SamplingParams(max_tokens=99))
    assert [d.text for d in deltas if d.text] == ["a", "🔥", "é", "漢", "z"]
    fire = next(d for d in deltas if d.text == "🔥")
    assert [t.token_id for t in fire.tokens] == ids[1:5]
    assert [t.text for t in fire.tokens] == ["", "", "", "🔥"]


def test_a_character_cut_off_at_the_end_shows(tokenizer: Tokenizer) -> None:
    ids = _bytes(tokenizer, "a🔥".encode()[:-1])
    deltas = _run(tokenizer, [[i] for i in ids], SamplingParams(max_tokens=99))
    assert "".join(d.text for d in deltas) == "a\ufffd" == tokenizer.decode(ids)
    assert deltas[-1].text == "\ufffd"
    assert [t.token_id for t in deltas[-1].tokens] == ids[1:]


def _bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    single = {tokenizer.token_bytes(i): i for i in range(3, 300)}
    return [single[bytes([byte])] for byte in data]


def test_nothing_of_a_stop_string_leaks(tokenizer: Tokenizer) -> None:
    ids = _bytes(tokenizer, b"abcDEFGHIJxyz")
    stream = [d.text for d in _run(tokenizer, [[i] for i in ids], SamplingParams(stop=["DEFGHIJ"]))]
    assert "".join(stream) == "abc"
    assert stream == ["a", "b", "c", *[""] * 7]


def test_held_text_is_flushed(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["DEFGHIJ"], max_tokens=99)
    failed = [d.text for d in _run(tokenizer, [[i] for i in _bytes(tokenizer, b"aDEFx")], params)]
    assert failed == ["a", "", "", "", "DEFx"]
    at_end = [d.text for d in _run(tokenizer, [[i] for i in _bytes(tokenizer, b"aDEF")], params)]
    assert at_end == ["a", "", "", "DEF"]


def test_stop_inside_a_token_keeps_its_head(tokenizer: Tokenizer) -> None:
    long_id = next(i for i in range(300, 4096) if len(set(tokenizer.token_text(i))) >= 6)
    text = tokenizer.token_text(long_id)
    deltas = _run(tokenizer, [[long_id]], SamplingParams(stop=[text[2:4]]))
    assert deltas[-1].text == text[:2]
    assert [(t.token_id, t.text) for t in deltas[-1].tokens] == [(long_id, text[:2])]


def test_min_tokens_puts_stops_off(tokenizer: Tokenizer) -> None:
    ids = _bytes(tokenizer, b"xSxSxS")
    for include in (False, True):
        params = SamplingParams(stop=["S"], min_tokens=3, include_stop_str_in_output=include)
        deltas = _run(tokenizer, [[i] for i in ids], params)
        assert "".join(d.text for d in deltas) == ("xSxS" if include else "xSx")
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "S")


@pytest.mark.parametrize("include", [False, True])
def test_the_stop_token_has_no_text_unless_asked_for(tokenizer: Tokenizer, include: bool) -> None:
    a, b = _bytes(tokenizer, b"ab")
    params = SamplingParams(stop_token_ids=[b], include_stop_str_in_output=include)
    deltas = _run(tokenizer, [[a], [b]], params, reason="stop", stop_token_id=b)
    assert "".join(d.text for d in deltas) == ("ab" if include else "a")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", b)
    assert [t.token_id for d in deltas for t in d.tokens] == [a, b]
    ended = _run(tokenizer, [[a], [2]], SamplingParams(), reason="stop", stop_token_id=2)
    assert ended[-1].stop_reason is None  # the end of the sequence has no reason of its own


def test_without_tokenizer_there_are_only_ids() -> None:
    deltas = _run(None, [[7], [8, 9]], SamplingParams())
    assert [d.text for d in deltas] == ["", ""]
    assert deltas[-1].finish_reason == "length"
    sent = [t.token_id for d in deltas for t in d.tokens]
    assert sent == [7, 8, 9]


# ---- the parts ----


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_stop_search_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    searches = [StopString(s) for s in stops]
    text = "".join(pieces)
    before = 0
    for piece in pieces:
        match = first_match(searches, piece, ignore_matches=False)
        if match is not None:
            end, stop = match
            assert _cut(text, stops, True) == (text[: before + end], stop.text)
            return
        before += len(piece)
        seen = text[:before]
        for search in searches:
            lengths = range(len(search.text))
            longest = max(n for n in lengths if seen.endswith(search.text[:n]))
            assert search.num_matched == longest
    assert not any(s in text for s in stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), noise=st.lists(st.integers(0, 255), max_size=6))
def test_prefix_detokenizer_equals_whole_decoding(text: str, noise: list[int]) -> None:
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"\u2581": 256, "a": 257, "\u2581b": 258}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    ids = [256]
    for character in text:
        ids += {"a": [257], " ": [256]}.get(character, list(character.encode()))
        ids += [258] if character == "b" else []
    detokenizer = PrefixDetokenizer(backend, skip_special_tokens=True)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == backend.decode(ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
    detokenizer = PrefixDetokenizer(backend, skip_special_tokens=True)
    for i in [*noise * 20, 257]:  # endless garbage is passed on, not kept
        detokenizer.push(i)
    assert detokenizer.finish() == ""


def test_byte_alphabet() -> None:
    assert token_bytes("\u0120a\u00c3\u00a9") == " aé".encode()
    assert token_bytes("<|im_end|>") == b"<|im_end|>"
    assert token_bytes("has space") == b"has space"
    assert token_bytes("漢") == "漢".encode()
