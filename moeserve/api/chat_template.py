"""Chat messages to one prompt: the model's Jinja template in a sandbox, as transformers renders it.

A template belongs to the model, messages belong to a user. So text of a user that spells a control
token is marked before rendering and found again behind it: ``Rendered.fake_positions`` tells the
tokenizer which control tokens are only quoted.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from moeserve.api.tokenizer import Tokenizer, TokenizerError, read_tokenizer_config

_RENDER_SECONDS = 1.0
_MAX_PRODUCT = 1 << 20
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class TemplateFault(ValueError):
    """The template refused or could not render these messages; the text may be shown to a user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the offsets in it where a user's text spells (part of) a control token."""

    text: str
    fake_positions: list[int]


class ChatTemplate:
    """A compiled template. ``render`` may run in any thread.

    Args:
        source: Jinja text.
        tokenizer: gives the control tokens and the named tokens (``bos_token`` ...).

    Raises:
        TokenizerError: not a valid template.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            literals = _literals(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TokenizerError(f"chat template: {error}") from error
        self._source = source
        self._named = tokenizer.special_tokens
        self._controls = tuple(
            token
            for token, token_id in tokenizer.added_tokens.items()
            if token_id in tokenizer.special_ids or (token in literals and not token.isspace())
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt for ``messages``.

        Args:
            max_chars: a longer prompt is refused while it is rendered.
            continue_final_message: the prompt ends inside the last message, without its end token.
            variables: more names for the template (such as ``enable_thinking``).

        Raises:
            TemplateFault: the template raised, took too long or wrote too much.
        """
        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        extra = dict(variables or {})
        if reserved := extra.keys() & {*_RESERVED, *self._named}:
            raise TemplateFault(f"{min(reserved)} can not be set by chat_template_kwargs")
        final = ""
        if continue_final_message:
            final = self._mark_final(chat)
        marker = _unused_character([chat, extra])
        chat, extra = _mark([chat, extra], self._controls, marker)
        text = self._write(
            {**self._named, **extra, "messages": chat, "tools": None, "documents": None}
            | {"add_generation_prompt": add_generation_prompt},
            max_chars,
        )
        if continue_final_message:
            text = _cut_at_tag(text, final, marker)
        return _unmark(text, marker)

    def _mark_final(self, chat: list[dict[str, Any]]) -> str:
        """Appends the tag to the last message; its content as it was."""
        content = chat[-1].get("content") if chat else None
        if not isinstance(content, str) or "content" not in self._source:
            raise TemplateFault("continue_final_message needs a last message with text content")
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content

    def _write(self, names: Mapping[str, Any], max_chars: int) -> str:
        deadline = time.monotonic() + _RENDER_SECONDS
        pieces, length = [], 0
        try:
            for piece in self._template.generate(names):
                pieces.append(piece)
                length += len(piece)
                if length > max_chars:
                    raise TemplateFault(f"the prompt is longer than {max_chars} characters")
                if time.monotonic() > deadline:
                    raise TemplateFault("the chat template takes too long for these messages")
        except jinja2.TemplateError as error:
            raise TemplateFault(f"chat template: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateFault(f"chat template: {type(error).__name__}") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateFault("the messages are too complex for the chat template") from error
        return "".join(pieces)


def load_chat_template(folder: Path, override: Path | None = None) -> str | None:
    """The template text: ``override``, ``chat_template.jinja``, or the one in the tokenizer config.

    Of a list of named templates it is the one called ``default``. None if the model has none.

    Raises:
        TokenizerError: the override can not be read.
    """
    path = override or folder / "chat_template.jinja"
    if override is not None or path.is_file():
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"chat template {path}: {error}") from error
    template = read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


# ---- telling a user's control tokens from the template's ----


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _strings(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _strings(item))


def _unused_character(value: Any) -> str:
    """A private-use character that occurs in no string of ``value``."""
    used = set().union(*map(set, _strings(value)))
    for point in range(0xF0000, 0xFFFFE):
        if chr(point) not in used:
            return chr(point)
    raise TemplateFault("the messages use every private-use character")


def _mark(value: Any, controls: Iterable[str], marker: str) -> Any:
    """``value`` with ``marker`` put into all that spells a control token, or could complete one."""
    if isinstance(value, str):
        return _mark_text(value, controls, marker)
    if isinstance(value, dict):
        return {key: _mark(item, controls, marker) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, controls, marker) for item in value]
    return value


def _mark_text(text: str, controls: Iterable[str], marker: str) -> str:
    cuts: set[int] = set()
    for control in controls:
        start = text.find(control)
        while start >= 0:
            cuts.add(start + 1)
            start = text.find(control, start + 1)
        lengths = range(1, len(control))
        if any(text.startswith(control[-n:]) and not control[-n].isspace() for n in lengths):
            cuts.add(0)
        if any(text.endswith(control[:n]) and not control[n - 1].isspace() for n in lengths):
            cuts.add(len(text))
    if not cuts:
        return text
    edges = [0, *sorted(cuts), len(text)]
    return marker.join(text[a:b] for a, b in itertools.pairwise(edges))


def _unmark(text: str, marker: str) -> Rendered:
    pieces = text.split(marker)
    positions, offset = [], 0
    for piece in pieces[:-1]:
        offset += len(piece)
        positions.append(offset)
    return Rendered("".join(pieces), positions)


def _cut_at_tag(text: str, final: str, marker: str) -> str:
    """``text`` up to the tag; white space that the template trimmed before it goes as well."""
    tag = _CONTINUE_TAG.strip()
    if tag not in text or final.strip() not in text.replace(marker, ""):
        raise TemplateFault("the chat template does not keep the message to be continued")
    at = text.rindex(tag)
    return text[:at] if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG else text[:at].rstrip()


# ---- the environment ----


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """transformers' environment; operators that can blow up a small text are bounded as well."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _is_bomb(operator, left, right):
            raise jinja2.exceptions.SecurityError(f"operator {operator} would make too much")
        return super().call_binop(context, operator, left, right)


def _is_bomb(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and re.search(r"%[^%a-zA-Z]*(\d{5,}|\*)", left) is not None
    if operator == "**":
        return not (_is_small(left) and _is_small(right))
    for text, count in ((left, right), (right, left)):
        if isinstance(text, str | list | tuple) and isinstance(count, int):
            return len(text) * count > _MAX_PRODUCT
    return False


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 64


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; it renders its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (the base class says so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without underscore attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


class _Dict:
    """``dict`` for templates: makes one, and is nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _literals(tree: jinja2.nodes.Template) -> str:
    """All text that the template itself writes, joined by NULs."""
    parts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    parts |= {n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str)}
    return "\0".join(parts)
