"""JSON responses."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi.responses import Response


class Json(Response):
    """A JSON response of an object, or of bytes that are JSON already."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200) -> None:
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        super().__init__(body, status_code)
