"""The tree of all settings: one frozen dataclass per section.

A setting is a field here and nowhere else. Its metadata carries the help text, the command-line
aliases and the choices; ``cli/options.py`` makes the flags from them, so a flag and a TOML key can
not drift apart. A component takes its own section, never the whole tree. What is found out at run
time (how many KV blocks fit, say) is a return value, never written back.
"""

from __future__ import annotations

import dataclasses
from typing import Any


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
    """Where experts are placed, and when they move."""

    placement: str = setting(
        "linear", "linear, round_robin, or a placement file (JSON).",
        alias=("--expert-placement-strategy",),
    )  # fmt: skip
    num_redundant_experts: int = setting(
        0, "Spare expert slots in every layer, over all ranks; copies of hot experts go there.",
        alias=("--eplb-config.num_redundant_experts",),
    )  # fmt: skip
    enable_eplb: bool = setting(False, "Move and copy experts while serving, as the load demands.")
    planner: str = setting(
        "scenario", "Who plans placements.",
        choices=("scenario", "eplb", "eplb-sticky", "flashlb", "exchange"),
        alias=("--eplb-config.planner",),
    )  # fmt: skip
    window_tokens: int = setting(
        2048, "Tokens of a window of load, over all ranks.",
        alias=("--eplb-config.window_tokens",),
    )  # fmt: skip
    rebalance_interval: float = setting(
        10.0, "Least seconds between two plans.", alias=("--eplb-config.rebalance_interval",)
    )
    rebalance_horizon: float = setting(
        300.0, "Seconds that a plan is expected to serve; it must save more time than it takes.",
        alias=("--eplb-config.rebalance_horizon",),
    )  # fmt: skip
    min_balancedness: float = setting(
        0.95, "No plan while mean over largest rank load is at least this.",
        alias=("--eplb-config.min_balancedness",),
    )  # fmt: skip
    step_bytes: str = setting(
        "4M", "Most bytes of experts that move between two steps, over all ranks.",
        alias=("--eplb-config.step_bytes",),
    )  # fmt: skip
    minute_bytes: str | None = setting(
        None, "Most bytes of experts that move in a minute; default: no limit.",
        alias=("--eplb-config.minute_bytes",),
    )  # fmt: skip
    expert_split: str = setting(
        "auto", "Who picks among copies of an expert: each rank, all ranks for each batch, or auto "
        "(with --enable-eplb: the latter for batches where it pays).",
        choices=("auto", "local", "batch"), alias=("--eplb-config.split",),
    )  # fmt: skip
    rebalance_dry_run: bool = setting(False, "Plan and log, but move nothing.")
    force_routing: str | None = setting(
        None, "Benchmarks only, answers become nonsense: experts are chosen by a made-up load, "
        "such as balanced, zipf:1.2, hot-expert, hot-rank, spread-hot or rotating:256.",
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
    admin_key: str | None = setting(
        None, "Bearer key of POST /experts/*, which moves experts; default: the API key."
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
            ("num_redundant_experts", self.experts.num_redundant_experts, 0),
            ("window_tokens", self.experts.window_tokens, 1),
            ("rebalance_interval", self.experts.rebalance_interval, 0),
            ("rebalance_horizon", self.experts.rebalance_horizon, 0),
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
        if not 0 <= self.experts.min_balancedness <= 1:
            value = self.experts.min_balancedness
            raise ConfigError(f"min_balancedness = {value}: must be between 0 and 1")
        for name, size in (
            ("kv_cache_memory", self.cache.kv_cache_memory),
            ("step_bytes", self.experts.step_bytes),
            ("minute_bytes", self.experts.minute_bytes),
        ):
            if size is not None:
                parse_bytes(name, size)
        _check_choices(self)


def _check_choices(config: ServeConfig) -> None:
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            choices = field.metadata["choices"]
            value = getattr(part, field.name)
            if choices and value not in choices:
                raise ConfigError(f"{field.name} = {value!r}: must be one of {', '.join(choices)}")


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
