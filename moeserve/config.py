"""From files, flags and the environment to the tree of settings (see ``settings.py``).

Nothing else reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import msgspec

from moeserve.settings import (
    CacheConfig,
    ConfigError,
    ExpertConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServeConfig,
    ServerConfig,
    parse_bytes,
)

__all__ = [
    "CacheConfig",
    "ConfigError",
    "ExpertConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServeConfig",
    "ServerConfig",
    "parse_bytes",
]


def sections() -> dict[str, type[Any]]:
    """Section name -> its dataclass, in the order of ``ServeConfig``."""
    hints = get_type_hints(ServeConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(ServeConfig)}


def load_toml(path: Path) -> dict[str, dict[str, Any]]:
    """The file's settings by section, unknown keys refused.

    Raises:
        ConfigError: no such file, not TOML, an unknown section or key (the nearest known name is
            proposed).
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: not valid TOML: {error}") from error
    for section, values in data.items():
        known = [field.name for field in dataclasses.fields(sections().get(section, ServeConfig))]
        if section not in sections():
            raise ConfigError(_unknown(f"section [{section}] in {path}", section, sections()))
        if not isinstance(values, dict):
            raise ConfigError(f"{section} in {path}: must be a section, [{section}]")
        for key in values:
            if key not in known:
                raise ConfigError(_unknown(f"key {section}.{key} in {path}", key, known))
    return data


def _unknown(what: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"unknown {what}" + (f"; did you mean {near[0]!r}?" if near else "")


def build(values: Mapping[str, Mapping[str, Any]]) -> ServeConfig:
    """Makes the tree from values by section; what is absent keeps its default.

    Raises:
        ConfigError: a value has the wrong type or is out of range; the text names the setting.
    """
    parts = {}
    for name, cls in sections().items():
        given = dict(values.get(name, {}))
        hints = get_type_hints(cls)
        for key, value in given.items():
            if key not in hints:
                raise ConfigError(_unknown(f"setting {key}", key, hints))
            try:
                given[key] = msgspec.convert(value, hints[key])
            except msgspec.ValidationError as error:
                kinds = [t.__name__ for t in get_args(hints[key]) or (hints[key],)]
                wanted = " or ".join(k for k in kinds if k != "NoneType")
                raise ConfigError(f"{key} = {value!r}: must be of type {wanted}") from error
        parts[name] = cls(**given)
    return ServeConfig(**parts)


def from_flat(**settings: Any) -> ServeConfig:
    """Makes the tree from setting names alone (they are unique over the sections).

    Raises:
        ConfigError: unknown name (the nearest is proposed), wrong type, out of range.
    """
    owner = {f.name: name for name, cls in sections().items() for f in dataclasses.fields(cls)}
    values: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        if key not in owner:
            raise ConfigError(_unknown(f"setting {key}", key, owner))
        values.setdefault(owner[key], {})[key] = value
    return build(values)


def encode(config: ServeConfig) -> bytes:
    """The tree as JSON, for a child process."""
    return msgspec.json.encode(config)


def decode(data: bytes) -> ServeConfig:
    """The inverse of ``encode``."""
    return msgspec.json.decode(data, type=ServeConfig)


@dataclasses.dataclass(frozen=True, slots=True)
class LauncherRank:
    """This process's place in a job that torchrun, deepspeed or another launcher started.

    attempt: how often the launcher has started the job again.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    attempt: int = 0


def launcher_rank(environ: Mapping[str, str] | None = None) -> LauncherRank | None:
    """The launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR ...), or None without a launcher.

    Raises:
        ConfigError: some of them are missing or no numbers.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    try:
        return LauncherRank(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_world_size=int(
                env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or env["WORLD_SIZE"]
            ),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(f"launcher environment: {error} missing or not a number") from error


def with_ep(serve_config: ServeConfig, world_size: int) -> ServeConfig:
    """The same tree for the number of ranks that a launcher started.

    Raises:
        ConfigError: the tree asks for another number.
    """
    if serve_config.parallel.ep not in (1, world_size):
        raise ConfigError(
            f"ep = {serve_config.parallel.ep}: the launcher started {world_size} processes"
        )
    parallel = dataclasses.replace(serve_config.parallel, ep=world_size)
    return dataclasses.replace(serve_config, parallel=parallel)


def api_key_from_env() -> str | None:
    """MOESERVE_API_KEY, so that the key need not stand in the process list."""
    return os.environ.get("MOESERVE_API_KEY") or None


def num_cores() -> int:
    """CPU cores that this process may use (affinity counts, not what the machine has)."""
    return len(os.sched_getaffinity(0))


def child_environment(**extra: str) -> dict[str, str]:
    """The environment of a child process: ours plus what a library reads only from there."""
    return {**cast(dict[str, str], dict(os.environ)), **extra}


def embedded_model_path() -> Path:
    """Folder of the model that ships with the package."""
    return Path(__file__).parent / "assets" / "embedded"


def resolve_model_path(name: str) -> Path:
    """The checkpoint folder that ``model`` names.

    Raises:
        ConfigError: not 'embedded' and not a folder with a config.json. Nothing is downloaded.
    """
    path = embedded_model_path() if name == "embedded" else Path(name)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model = {name!r}: must be 'embedded' or a folder with a config.json; "
            "checkpoints are not downloaded"
        )
    return path
