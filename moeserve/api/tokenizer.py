"""Text <-> token ids from ``tokenizer.json`` alone, equal to transformers' AutoTokenizer.

transformers itself is only the oracle of the tests: importing it would load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from moeserve.api.detokenizer import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    PrefixDetokenizer,
    token_bytes,
)
from moeserve.config import ModelConfig, resolve_model_path

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(ValueError):
    """The tokenizer files can not be used; the text names the file and the fault."""


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    Attributes:
        special_tokens: the named ones (``bos_token`` ...) that ``tokenizer_config.json`` sets.
        special_ids: ids left out by ``skip_special_tokens``.
        vocab_size: number of token ids that have a text (the logits may be wider).
        max_token_chars: characters of the longest token: bounds the tokens of a text from below.
    """

    def __init__(self, source: bytes, config: dict[str, Any]) -> None:
        self._source = source
        self._backend = tokenizers.Tokenizer.from_buffer(source)
        self._backend.no_padding()
        self._backend.no_truncation()
        self.special_tokens = {
            name: _content(config[name]) for name in _NAMED if config.get(name) is not None
        }
        _add_tokens(self._backend, config, self.special_tokens)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_tokens = {token.content: i for i, token in added.items()}
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self._vocab = {token_id: token for token, token_id in vocab.items()}
        self.vocab_size = len(vocab)
        self.max_token_chars = max(map(len, vocab), default=1)
        self._byte_table = (
            ByteTable(self._vocab, self.special_ids) if _is_byte_level(source) else None
        )
        self._plain: tokenizers.Tokenizer | None = None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder.

        Raises:
            TokenizerError: ``tokenizer.json`` is missing or not readable.
        """
        config = {**read_json(folder / "special_tokens_map.json"), **read_tokenizer_config(folder)}
        try:
            return cls((folder / "tokenizer.json").read_bytes(), config)
        except Exception as error:  # the library raises bare Exception for a bad file
            raise TokenizerError(f"{folder / 'tokenizer.json'}: {error}") from error

    @classmethod
    def from_config(cls, model: ModelConfig) -> Tokenizer:
        """The tokenizer that ``--tokenizer`` names, else the model's.

        Raises:
            TokenizerError: see ``load``.
            ConfigError: the model's folder is not there.
        """
        return cls.load(tokenizer_folder(model))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens in it are recognised."""
        # The batch call gives up the interpreter lock, so that a long text stalls no other thread.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encodings[0].ids)

    def encode_chat(
        self, text: str, fake_positions: Sequence[int], *, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a rendered chat, in which some control tokens are only quoted by a user.

        Args:
            text: the rendered template.
            fake_positions: offsets inside ``text``; a control token that covers the character
                before one of them becomes plain text.
            add_special_tokens: almost never right: templates write them.
        """
        if not fake_positions:
            return self.encode(text, add_special_tokens=add_special_tokens)
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        controls = set(self.added_tokens.values())
        token_ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in controls and any(start < p <= end for p in fake_positions):
                token_ids += self._encode_plain(text[start:end], token_id)
            else:
                token_ids.append(token_id)
        return token_ids

    def _encode_plain(self, text: str, control_id: int) -> list[int]:
        """Token ids of ``text`` as if no added token existed."""
        if self._plain is None:
            source = msgspec.json.decode(self._source)
            source["added_tokens"] = []
            self._plain = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(source))
        token_ids = self._encode_inside(self._plain, text)
        if control_id in token_ids:  # the model itself merges up to it: go by characters
            pieces = [self._encode_inside(self._plain, character) for character in text]
            token_ids = [i for piece in pieces for i in piece if i != control_id]
        return token_ids

    @staticmethod
    def _encode_inside(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Encodes as in the middle of a text: after a newline, so that no space is put in front."""
        newline = backend.encode("\n", add_special_tokens=False).ids
        token_ids = list(backend.encode("\n" + text, add_special_tokens=False).ids)
        if token_ids[: len(newline)] == newline:
            return token_ids[len(newline) :]
        return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids without a text are left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence."""
        if self._byte_table is not None:
            return ByteDetokenizer(self._byte_table, skip_special_tokens=skip_special_tokens)
        return PrefixDetokenizer(self._backend, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token for display: its text; ``bytes:\\xf0\\x9f`` for a part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes one token stands for (b"" for ids without a text)."""
        token = self._vocab.get(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return token.encode()
        if self._byte_table is not None:
            return token_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])  # byte fallback of SentencePiece vocabularies
        return token.replace("\u2581", " ").encode()


def tokenizer_folder(model: ModelConfig) -> Path:
    """Where the tokenizer's files are."""
    return Path(model.tokenizer) if model.tokenizer else resolve_model_path(model.model)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file.

    Raises:
        TokenizerError: not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TokenizerError(f"{path}: {error}") from error


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` of a folder, {} if it has none."""
    return read_json(folder / "tokenizer_config.json")


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _added_token(token: Any, *, special: bool) -> tokenizers.AddedToken:
    if not isinstance(token, dict):
        return tokenizers.AddedToken(str(token), special=special, normalized=False)
    flags = {k: bool(token[k]) for k in ("single_word", "lstrip", "rstrip") if k in token}
    normalized = bool(token.get("normalized", not token.get("special", special)))
    return tokenizers.AddedToken(token["content"], special=special, normalized=normalized, **flags)


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]
) -> None:
    """Adds the tokens that only the config knows of, and marks the named ones as special."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in present:
            backend.add_tokens([_added_token(token, special=bool(token.get("special")))])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    specials = [config[name] for name in named]
    specials += extra.values() if isinstance(extra, dict) else extra
    backend.add_special_tokens([_added_token(token, special=True) for token in specials])


def _is_byte_level(source: bytes) -> bool:
    """True if decoding is exactly: bytes of the tokens, joined, as UTF-8."""
    decoder = msgspec.json.decode(source, type=_TokenizerFile).decoder
    return decoder is not None and decoder.get("type") == "ByteLevel"


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None
