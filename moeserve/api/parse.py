"""Bytes to a checked request. Whatever the bytes are, the outcome is a request or a 400."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from moeserve.api.errors import ApiError, bad_request, cut, from_validation

logger = logging.getLogger(__name__)

MAX_DEPTH = 64

R = TypeVar("R", bound=BaseModel)


def parse(model: type[R], body: bytes, content_type: str) -> R:
    """The request in ``body``.

    Raises:
        ApiError: 400 or 415; the text names the field.
    """
    data = decode_object(body, content_type)
    for field, neutral in getattr(model, "NOT_IMPLEMENTED", {}).items():
        value = data.get(field)
        if value is not None and value not in neutral:
            text = f"{field} is not implemented here (got {cut(repr(value)[:1000])})"
            raise bad_request(text, param=field)
    if logger.isEnabledFor(logging.DEBUG):
        unknown = data.keys() - model.model_fields.keys()
        logger.debug("ignored unknown fields: %s", [cut(name) for name in sorted(unknown)[:10]])
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_context=False)) from error


def decode_object(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        ApiError: 400 or 415.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"content-type is {cut(kind)}: must be application/json")
    try:
        data = msgspec.json.decode(body)
    except RecursionError as error:
        raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise bad_request(f"the body is not valid JSON: {cut(str(error))}") from error
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object")
    _check_depth(data)
    return data


def _check_depth(data: dict[str, Any]) -> None:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        children = (v.values() if isinstance(v, dict) else v for v in level)
        level = [c for values in children for c in values if isinstance(c, dict | list)]
        if not level:
            return
    raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels")
