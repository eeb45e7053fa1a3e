"""Tile tables: JSON files, one a kind of kernel and a chip, in ``configs/kernels`` of the project.

``tile_tables`` beside this file is a link to that folder; a wheel carries the files themselves.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "tile_tables"


@cache
def load(kind: str, target: str) -> dict[str, Any]:
    """The table of ``kind`` ("moe", "attention", "rows") for the chip ``target`` ("sm_90").

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    path = _FOLDER / f"{kind}-{target}.json"
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        text = f"no tile table {path.name}: there is no kernel of {kind} for {target}"
        raise ValueError(text) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: must be a JSON object, is a {type(table).__name__}")
    return table
