"""Word tables of the synthetic text, and the small grammar helpers that use them."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

DATA_DIR = Path(__file__).parent / "data"


@cache
def load_table(name: str) -> dict[str, Any]:
    """Return one of the JSON tables in data/: words, intents, unknown or functions."""
    table: dict[str, Any] = json.loads((DATA_DIR / f"{name}.json").read_text(encoding="utf-8"))
    return table


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case and the rest as it is."""
    return text[0].upper() + text[1:]


def with_article(noun: str) -> str:
    """Return "a noun" or "an noun"."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def without_article(noun_phrase: str) -> str:
    """Return "red ball" for "a red ball"."""
    return noun_phrase.split(" ", 1)[1]


def pick(rng: random.Random, *options: str) -> str:
    """Return one of the options."""
    return rng.choice(options)


def chance(rng: random.Random, probability: float) -> bool:
    """Return True with the given probability."""
    return rng.random() < probability


def pseudo_word(rng: random.Random) -> str:
    """Return a made-up word of two or three syllables, such as "grimolar"."""
    table = load_table("unknown")
    syllables = [rng.choice(table["syllables"]) for _ in range(rng.randint(2, 3))]
    return "".join([*syllables, rng.choice(table["endings"])])
