"""The tokenizer against transformers' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from moeserve.api.tokenizer import Tokenizer, TokenizerError
from moeserve.config import embedded_model_path

TEXTS = [
    "",
    "Hello, world!",
    "  leading and trailing  ",
    "Zwölf Boxkämpfer jagen Viktor\n\tüber den Sylter Deich",
    "日本語 and 🔥🔥 emoji 👩‍👩‍👧",
    "def f(x):\n    return x ** 2\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<s>[INST] hi [/INST]</s>",
    "\x00\x01\u200b\ufeff",
]


@pytest.fixture(scope="module")
def oracle() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add", [True, False])
def test_embedded_model_encodes_like_transformers(
    tokenizer: Tokenizer, oracle: AutoTokenizer, text: str, add: bool
) -> None:
    assert tokenizer.encode(text, add_special_tokens=add) == oracle.encode(
        text, add_special_tokens=add
    )


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_encodes_like_transformers(
    tokenizer: Tokenizer, oracle: AutoTokenizer, text: str
) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == oracle.encode(text)
    for skip in (True, False):
        ours = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert ours == oracle.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 4095), max_size=60), skip=st.booleans())
def test_any_tokens_decode_like_transformers(
    tokenizer: Tokenizer, oracle: AutoTokenizer, token_ids: list[int], skip: bool
) -> None:
    ours = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert ours == oracle.decode(token_ids, skip_special_tokens=skip)


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.vocab_size == 4096
    assert tokenizer.max_token_chars > 4


def test_token_text_shows_parts_of_characters(tokenizer: Tokenizer) -> None:
    fire = "🔥".encode()
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("🔥")]
    assert b"".join(pieces) == fire
    partial = next(i for i in range(4096) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.token_text(partial) == "bytes:\\xf0"
    assert tokenizer.token_text(0) == "<|endoftext|>"
    assert tokenizer.token_text(99_999) == ""


# ---- other kinds of tokenizers ----


def _llama_style(folder: Path, **config: object) -> Path:
    """A SentencePiece-like BPE with byte fallback, as Llama-2 and Mixtral have."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["\u2581", *"abcdefghijklmnopqrstuvwxyz[]/INST", "he", "ll", "\u2581he", "hell"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [("h", "e"), ("l", "l"), ("\u2581", "he"), ("he", "ll")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return _save(folder, backend, {"bos_token": "<s>", "eos_token": "</s>", **config})


def _gpt2_style(folder: Path, **config: object) -> Path:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    return _save(folder, backend, {"eos_token": "<|endoftext|>", **config})


def _save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


CONFIGS: list[dict[str, object]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>"},
    {"additional_special_tokens": ["<|extra|>", "<|more|>"]},
    {"added_tokens_decoder": {"900": {"content": "<|late|>", "special": True, "lstrip": True}}},
    {"pad_token": {"__type": "AddedToken", "content": "<pad>", "special": True}},
    {"added_tokens_decoder": {"901": {"content": "<tool>", "special": False, "rstrip": False}}},
]


@pytest.mark.parametrize("make", [_llama_style, _gpt2_style])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_other_tokenizers_match_transformers(
    make: object, config: dict[str, object], tmp_path: Path
) -> None:
    folder = make(tmp_path / "model", **config)  # type: ignore[operator]
    ours, oracle = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "hello <|late|> hell <tool> <pad>x<|extra|> <think>"]:
        for add in (True, False):
            expected = oracle.encode(text, add_special_tokens=add)
            token_ids = ours.encode(text, add_special_tokens=add)
            assert token_ids == expected, text
            for skip in (True, False):
                decoded = oracle.decode(expected, skip_special_tokens=skip)
                assert ours.decode(token_ids, skip_special_tokens=skip) == decoded
                detokenizer = ours.detokenizer(skip_special_tokens=skip)
                pieces = [detokenizer.push(token_id) for token_id in token_ids]
                assert "".join(pieces) + detokenizer.finish() == decoded
    assert ours.special_ids == set(oracle.all_special_ids) | {
        i for i, token in oracle.added_tokens_decoder.items() if token.special
    }


def test_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)
