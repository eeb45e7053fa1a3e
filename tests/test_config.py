"""Settings: file, flags and Python names lead to the same tree; mistakes are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from moeserve import config
from moeserve.cli import options
from moeserve.cli.main import serve

FIELDS = [
    (section, field)
    for section, cls in config.sections().items()
    for field in dataclasses.fields(cls)
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_setting_names_are_unique_over_the_sections() -> None:
    names = [field.name for _, field in FIELDS]
    assert len(names) == len(set(names))


def test_every_setting_has_a_flag_and_help() -> None:
    text = CliRunner().invoke(serve, ["--help"]).output
    for _, field in FIELDS:
        if field.name != "model":
            assert "--" + field.name.replace("_", "-") in text
        assert field.metadata["help"].endswith(".")


def test_command_line_overrides_file_overrides_default(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "[cache]\nblock_size = 8\nnum_blocks = 7\n[parallel]\nep = 2")
    tree = options.load(file, {"cache": {"block_size": 32}}, None)
    assert tree.cache.block_size == 32
    assert tree.cache.num_blocks == 7
    assert tree.parallel.ep == 2
    assert tree.scheduler == config.SchedulerConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cache]\nblok_size = 8", ["cache.blok_size", "did you mean 'block_size'"]),
        ("[cach]\nblock_size = 8", ["[cach]", "did you mean 'cache'"]),
        ("[cache]\nblock_size = 'x'", ["block_size", "'x'", "int"]),
        ("[cache]\nblock_size = 0", ["block_size = 0", "at least 1"]),
        ("[cache]\nblock_size = true", ["block_size", "int"]),
        ("[server]\nport = 70000", ["port = 70000", "65535"]),
        ("[model]\ndtype = 'float16'", ["dtype", "'float16'", "bfloat16"]),
        ("[cache]\nkv_cache_memory = 'lots'", ["kv_cache_memory", "lots", "512M"]),
        ("cache = 3", ["cache", "section"]),
        ("[cache", ["not valid TOML"]),
    ],
)
def test_wrong_file_is_refused_by_name(text: str, words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(serve, ["--config", str(write(tmp_path / "a.toml", text))])
    assert result.exit_code == 2
    for word in words:
        assert word in result.output


def test_the_example_files_are_valid() -> None:
    folder = Path(__file__).parent.parent / "configs"
    files = sorted(folder.glob("*.toml"))
    assert files
    for file in files:
        options.load(file, {}, None)


def test_missing_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(serve, ["--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 2 and "none.toml" in result.output


def test_unknown_python_setting_proposes_the_nearest() -> None:
    with pytest.raises(config.ConfigError, match="did you mean 'max_model_len'"):
        config.from_flat(max_model_length=3)


def test_model_must_be_a_checkpoint_folder(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"config\.json"):
        config.resolve_model_path(str(tmp_path))


@given(
    ep=st.integers(1, 8),
    tokens=st.integers(1, 10**6),
    memory=st.sampled_from([None, "1G", "512M"]),
    timeout=st.floats(0, 1000),
)
def test_the_tree_survives_the_way_to_a_child_process(
    ep: int, tokens: int, memory: str | None, timeout: float
) -> None:
    tree = config.from_flat(
        ep=ep, max_num_batched_tokens=tokens, kv_cache_memory=memory, shutdown_timeout=timeout
    )
    assert config.decode(config.encode(tree)) == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("64K", 65536), ("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29)],
)
def test_sizes(text: str, value: int) -> None:
    assert config.parse_bytes("x", text) == value


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_a_named_error(text: str) -> None:
    try:
        assert config.parse_bytes("kv_cache_memory", text) > 0
    except config.ConfigError as error:
        assert "kv_cache_memory" in str(error)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            config.LauncherRank(1, 2, 1, 2, "127.0.0.1", 29500),
        ),
    ],
)  # fmt: skip
def test_launcher_variables(environ: dict[str, str], expected: Any) -> None:
    assert config.launcher_rank(environ) == expected


def test_half_a_launcher_environment_is_an_error() -> None:
    with pytest.raises(config.ConfigError, match="MASTER_ADDR"):
        config.launcher_rank({"RANK": "0", "WORLD_SIZE": "2"})
