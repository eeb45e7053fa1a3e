"""What a checkpoint's folder and the settings make of the ranks, and what is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moeserve import config
from moeserve.engine.setup import make_setup


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model's small files."""
    for name in ("config.json", "generation_config.json"):
        shutil.copy(config.embedded_model_path() / name, tmp_path)
    return tmp_path


def test_ends_of_both_files_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7], "top_p": 0.9}')
    assert make_setup(config.from_flat(model=str(folder))).eos_token_ids == (2, 0, 7)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": -1}', '{"eos_token_id": 4096}']
)
def test_a_bad_generation_config_is_named(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config"):
        make_setup(config.from_flat(model=str(folder)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ep": 17}, "ep = 17: must be at most 16"),
        ({"max_model_len": 1025}, "max_model_len = 1025.*1024"),
        ({"placement": "none.json"}, "none.json"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_named(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_setup(config.from_flat(**settings))
