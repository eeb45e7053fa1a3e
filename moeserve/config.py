"""All settings: one tree of frozen dataclasses, and the only reader of the environment.

A setting is a field here and nowhere else. Its metadata carries the help text, the command-line
aliases and the choices; ``cli/options.py`` makes the flags from them, so a flag and a TOML key can
not drift apart. A component takes its own section, never the whole tree. What is found out at run
time (how many KV blocks fit, say) is a return value, never written back.
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


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type or out of range; the text says what is right."""


def setting(
    default: Any, help: str, *, alias: tuple[str, ...] = (), choices: tuple[str, ...] = ()
) -> Any:
    """A dataclass field with what the command line needs to know about it."""
    return dataclasses.field(
        default=default, metadata={"help": help, "alias": alias, "choices": choices}
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, how it is named and in which precision it runs."""

    model: str = setting("embedded", "Folder of a Hugging Face checkpoint, or 'embedded'.")
    served_model_name: str | None = setting(None, "Model name in the API; default: MODEL.")
    tokenizer: str | None = setting(None, "Folder with tokenizer.json; default: the model's.")
    skip_tokenizer_init: bool = setting(False, "No tokenizer: token ids in, token ids out.")
    chat_template: str | None = setting(None, "File with a Jinja chat template.")
    dtype: str = setting(
        "auto", "Compute precision; auto takes the checkpoint's.",
        choices=("auto", "float32", "bfloat16"),
    )  # fmt: skip
    load_format: str = setting(
        "auto", "auto reads safetensors; dummy makes random weights from config.json alone.",
        choices=("auto", "safetensors", "dummy"),
    )  # fmt: skip
    seed: int = setting(0, "Seed of dummy weights and of unseeded requests.")
    max_model_len: int | None = setting(None, "Longest prompt plus output, in tokens.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Ranks: how many, how tokens travel between them, how many threads each uses."""

    ep: int = setting(1, "Number of expert-parallel ranks.", alias=("--data-parallel-size", "-dp"))
    dispatcher: str = setting(
        "auto", "How tokens reach their experts; auto picks per step by cost.",
        choices=("auto", "all_to_all", "all_gather"),
        alias=("--all2all-backend",),
    )  # fmt: skip
    threads_per_rank: int | None = setting(None, "CPU threads per rank; default: cores / ranks.")
    batch_invariant: bool = setting(
        False, "Each row's result is independent of what else is in the batch (slower)."
    )
    collective_timeout: float = setting(60.0, "Seconds after which a silent peer is an error.")
    interface: str = setting("lo", "Network interface of rank-to-rank traffic.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """Where experts are placed."""

    placement: str = setting(
        "linear", "linear, round_robin, or a placement file (JSON).",
        alias=("--expert-placement-strategy",),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Paged KV cache."""

    block_size: int = setting(16, "Tokens per KV block.")
    kv_cache_memory: str | None = setting(
        None, "KV bytes per rank, such as 512M or 2G; default: derived from free memory.",
        alias=("--kv-cache-memory-bytes",),
    )  # fmt: skip
    num_blocks: int | None = setting(
        None, "KV blocks per rank; overrides --kv-cache-memory.",
        alias=("--num-gpu-blocks-override",),
    )  # fmt: skip
    enable_prefix_caching: bool = setting(True, "Reuse the KV of equal prompt prefixes.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Who runs when, on each rank."""

    scheduling_policy: str = setting(
        "fcfs", "Order of waiting requests; priority: lower number first.",
        choices=("fcfs", "priority"),
    )  # fmt: skip
    max_num_seqs: int = setting(64, "Most running requests per rank.")
    max_num_batched_tokens: int = setting(2048, "Token budget of a step, per rank.")
    enable_chunked_prefill: bool = setting(True, "Spread a long prompt over several steps.")
    max_num_queued_reqs: int | None = setting(
        None, "Refuse (503) above this many waiting requests, over all ranks."
    )
    max_num_queued_tokens: int | None = setting(
        None, "Refuse (503) above this many waiting prompt tokens, over all ranks."
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.")
    api_key: str | None = setting(
        None, "Bearer key of /v1, /tokenize, /detokenize, /experts (or MOESERVE_API_KEY)."
    )
    api_server_count: int = setting(1, "Number of HTTP processes.")
    allowed_origins: str | None = setting(None, "CORS origins, comma separated; * for all.")
    max_body_bytes: int = setting(8 << 20, "Largest request body, in bytes (413 above).")
    shutdown_timeout: float = setting(30.0, "Seconds that SIGTERM gives requests to finish.")
    metrics_prefix: str = setting("moeserve", "Prefix of metric names; vllm suits its dashboards.")
    log_level: str = setting(
        "info", "Least important log line shown.", choices=("debug", "info", "warning", "error")
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """The whole tree; each attribute is one section of the TOML file."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    experts: ExpertConfig = dataclasses.field(default_factory=ExpertConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("ep", self.parallel.ep, 1),
            ("threads_per_rank", self.parallel.threads_per_rank, 1),
            ("block_size", self.cache.block_size, 1),
            ("num_blocks", self.cache.num_blocks, 1),
            ("max_model_len", self.model.max_model_len, 1),
            ("max_num_seqs", self.scheduler.max_num_seqs, 1),
            ("max_num_batched_tokens", self.scheduler.max_num_batched_tokens, 1),
            ("max_num_queued_reqs", self.scheduler.max_num_queued_reqs, 0),
            ("max_num_queued_tokens", self.scheduler.max_num_queued_tokens, 0),
            ("api_server_count", self.server.api_server_count, 1),
            ("max_body_bytes", self.server.max_body_bytes, 1),
            ("port", self.server.port, 0),
            ("shutdown_timeout", self.server.shutdown_timeout, 0),
        ):
            if value is not None and not least <= value < 2**31:
                raise ConfigError(f"{name} = {value}: must be at least {least} and below 2**31")
        if self.server.port > 65535:
            raise ConfigError(f"port = {self.server.port}: must be at most 65535")
        if self.cache.kv_cache_memory is not None:
            parse_bytes("kv_cache_memory", self.cache.kv_cache_memory)
        _check_choices(self)


def _check_choices(config: ServeConfig) -> None:
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            choices = field.metadata["choices"]
            value = getattr(part, field.name)
            if choices and value not in choices:
                raise ConfigError(f"{field.name} = {value!r}: must be one of {', '.join(choices)}")


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


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(name: str, text: str) -> int:
    """Bytes from '1048576', '512M', '2G', '1.5GiB'.

    Raises:
        ConfigError: not a positive size; the text names the setting.
    """
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = body[-1:] if body[-1:] in _UNITS and body else ""
    try:
        value = float(body.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 < value < 2**60:
        raise ConfigError(f"{name} = {text!r}: must be a size such as 512M or 2G")
    return int(value)


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
