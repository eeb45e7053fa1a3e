"""Puts one rank together: spec, placement, weights, KV cache, scheduler, loop.

The order matters: what can be refused is refused before anything is loaded, weights are loaded
before ranks meet (a slow disk must not run into a collective's time-out), and the KV cache comes
last, when it is known what memory is left.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in the stubs

from moeserve import config, messages
from moeserve.engine import placement_control, views
from moeserve.engine.batches import BatchBuilder
from moeserve.engine.block_pool import BlockPool
from moeserve.engine.channel import Channel
from moeserve.engine.loop import EngineLoop
from moeserve.engine.observer import Observer
from moeserve.engine.placement_control import make_controller, make_manager
from moeserve.engine.runner import ModelRunner
from moeserve.engine.sampler import Sampler
from moeserve.engine.scheduler import Scheduler
from moeserve.engine.setup import make_setup
from moeserve.engine.spec import WorkerSpec
from moeserve.experts.load import LoadCounter
from moeserve.experts.split import CopyChooser
from moeserve.experts.store import ExpertStore
from moeserve.experts.traffic import Traffic
from moeserve.model.decoder import Decoder
from moeserve.model.decoder_weights import DecoderWeights, read_weights
from moeserve.model.kv_cache import KVCache, bytes_per_block
from moeserve.model.layers.forced_router import ForcedRouting, make_routing
from moeserve.model.layers.moe import ExpertRuntime
from moeserve.model.loader import load_experts, open_weights
from moeserve.parallel.agreement import Agreement
from moeserve.parallel.choose import DispatcherChooser, TokenShape
from moeserve.parallel.groups import ParallelGroups
from moeserve.status import StatusPipe
from moeserve_kernels import get_ops
from moeserve_kernels.cpu_memory import keep_freed_memory

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Ranks wait for each other this long before they meet: one may be reading a slow disk.
LOADING_TIMEOUT = timedelta(minutes=30)

_FORCED = "FORCED to {}; for benchmarks only, answers are nonsense (--force-routing)"

# Share of the free memory that the KV cache may take when nobody says how much.
KV_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that is ready to step, and what a person may want to know of it."""

    loop: EngineLoop
    facts: dict[str, str]


class Assembly:
    """The steps from a plan to a rank; one object, used once."""

    def __init__(self, spec: WorkerSpec, status: StatusPipe) -> None:
        self._worker = spec
        self._config = spec.config
        self._status = status
        self._plan = make_setup(spec.config)
        self._dtype = _DTYPES[self._plan.dtype]
        plan = self._plan
        self._store = ExpertStore(
            plan.placement,
            spec.rank,
            hidden_size=plan.spec.hidden_size,
            intermediate_size=plan.spec.moe_intermediate_size,
            dtype=self._dtype,
        )
        self._traffic = Traffic(plan.spec.moe_layers)
        self._load = LoadCounter(plan.spec.moe_layers, plan.spec.num_experts)
        self._ops = get_ops("invariant" if self._config.parallel.batch_invariant else "cpu")
        workload = self._config.experts.force_routing
        self._forced = None if workload is None else self._routing(workload)

    def _routing(self, workload: str) -> ForcedRouting:
        spec = self._plan.spec
        forced = make_routing(
            workload,
            layers=spec.moe_layers,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_ranks=self._config.parallel.ep,
        )
        if self._worker.rank == 0:
            logger.warning("routing is %s", _FORCED.format(workload))
        return forced

    def load_weights(self) -> DecoderWeights:
        """Fills this rank's expert slots and returns all other weights.

        Raises:
            ValueError: the checkpoint does not fit its config; the text names the tensors.
        """
        plan, model = self._plan, self._config.model
        source = open_weights(
            plan.folder, plan.spec, self._dtype, load_format=model.load_format, seed=model.seed
        )
        slots = {layer: self._store.logical(layer) for layer in self._store.layers}
        load_experts(source, slots, self._store.load)
        return read_weights(plan.spec, source)

    def build_model(
        self, weights: DecoderWeights, groups: ParallelGroups, chooser: CopyChooser
    ) -> Decoder:
        """The model over its weights and the ranks' transports."""
        plan, parallel = self._plan, self._config.parallel
        shape = TokenShape(
            hidden_size=plan.spec.hidden_size,
            top_k=plan.spec.top_k,
            element_size=self._dtype.itemsize,
        )
        runtime = ExpertRuntime(
            store=self._store,
            chooser=chooser,
            load=self._load,
            traffic=self._traffic,
            dispatcher=DispatcherChooser(
                groups,
                slots_per_rank=self._store.slot_map.slots_per_rank,
                shape=shape,
                ops=self._ops,
                dispatcher=parallel.dispatcher,
            ),
            pairs_travel_home=parallel.batch_invariant,
            forced=self._forced,
        )
        return Decoder(plan.spec, weights, self._ops, runtime, max_model_len=plan.max_model_len)

    def num_blocks(self) -> int:
        """KV blocks of this rank: as set, as memory set allows, or as free memory suggests.

        Raises:
            ValueError: the memory does not hold one block.
        """
        cache, plan = self._config.cache, self._plan
        if cache.num_blocks is not None:
            return cache.num_blocks
        size = bytes_per_block(plan.spec, cache.block_size, self._dtype)
        if cache.kv_cache_memory is not None:
            memory = config.parse_bytes("kv_cache_memory", cache.kv_cache_memory)
            if memory < size:
                raise ValueError(
                    f"kv_cache_memory = {cache.kv_cache_memory}: a block of {cache.block_size} "
                    f"tokens takes {size} bytes"
                )
            return memory // size
        free = psutil.virtual_memory().available * KV_MEMORY_SHARE / self._worker.ranks_on_host
        most = self._config.scheduler.max_num_seqs * -(-plan.max_model_len // cache.block_size)
        return max(1, min(most, int(free) // size))

    def copy_chooser(self, groups: ParallelGroups) -> CopyChooser:
        """Who picks among the copies of an expert."""
        return CopyChooser(self._store, groups.all_gather, groups.world_size)

    def build_rank(
        self, model: Decoder, groups: ParallelGroups, chooser: CopyChooser, channel: Channel
    ) -> Rank:
        """The loop and its parts."""
        plan, cache = self._plan, self._config.cache
        num_blocks = self.num_blocks()
        with self._status.phase("KV cache"):
            kv_cache = KVCache.allocate(plan.spec, num_blocks, cache.block_size, self._dtype)
            keep_freed_memory()
        experts = self._config.experts
        manager = None
        if self._worker.rank == 0:
            manager = make_manager(experts, self._store, plan.spec.top_k)
        controller = make_controller(
            groups, experts, self._store, self._load, self._traffic, chooser, manager
        )
        scheduler = Scheduler(
            self._config.scheduler,
            block_pool=BlockPool(
                num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching
            ),
            max_model_len=plan.max_model_len,
            eos_token_ids=plan.eos_token_ids,
            vocab_size=plan.spec.vocab_size,
            seed=self._config.model.seed,
        )
        runner = ModelRunner(model, self._store, self._load, kv_cache)
        observer = Observer(
            channel=channel,
            info=self._info(num_blocks),
            stats=views.stats(self._worker.rank, scheduler, self._traffic),
            views={
                "placement": views.placement(self._store),
                "load": views.load(self._load, self._traffic),
                "check": views.check(scheduler, runner),
                **({} if manager is None else {"history": placement_control.history(manager)}),
            },
            commands={} if manager is None else placement_control.commands(manager),
        )
        loop = EngineLoop(
            channel=channel,
            scheduler=scheduler,
            agreement=Agreement(groups),
            batches=BatchBuilder(cache.block_size),
            runner=runner,
            sampler=Sampler(),
            controller=controller,
            observer=observer,
        )
        return Rank(loop, self._facts(num_blocks))

    def _info(self, num_blocks: int) -> messages.RankInfo:
        plan = self._plan
        return messages.RankInfo(
            rank=self._worker.rank,
            protocol=messages.PROTOCOL,
            vocab_size=plan.spec.vocab_size,
            max_model_len=plan.max_model_len,
            block_size=self._config.cache.block_size,
            num_blocks=num_blocks,
            num_layers=plan.spec.num_layers,
            num_experts=plan.spec.num_experts,
        )

    def _facts(self, num_blocks: int) -> dict[str, str]:
        plan, cache = self._plan, self._config.cache
        num_tokens = num_blocks * cache.block_size
        num_bytes = num_blocks * bytes_per_block(plan.spec, cache.block_size, self._dtype)
        forced = {}
        if self._forced is not None and self._worker.rank == 0:
            forced["ROUTING"] = _FORCED.format(self._forced.workload)
        return {
            **forced,
            "experts": self._expert_facts(),
            "KV cache": f"{num_bytes / 2**20:.0f} MiB buys {num_tokens} tokens "
            f"({num_tokens / plan.max_model_len:.1f} requests of {plan.max_model_len})",
            "compute": f"{torch.get_num_threads()} threads, {plan.dtype}, {self._ops.description}",
        }

    def _expert_facts(self) -> str:
        """Slots and their bytes, and what the spare ones cost in KV cache."""
        store, plan = self._store, self._plan
        held = [expert for layer in store.layers for expert in store.logical(layer)]
        text = f"{len(held)} slots in {len(store.layers)} layers, {store.num_bytes / 2**20:.0f} MiB"
        num_spare = held.count(None)
        if num_spare:
            spare_bytes = num_spare * store.expert_bytes
            token_bytes = bytes_per_block(plan.spec, 1, self._dtype)
            text += (
                f"; {num_spare} spare: {spare_bytes / 2**20:.0f} MiB, the KV cache of "
                f"{spare_bytes // token_bytes} tokens"
            )
        return text


def meet(spec: WorkerSpec, store: Store | None) -> ParallelGroups:
    """Connects the ranks, once all have loaded.

    Raises:
        RuntimeError: a rank did not come.
    """
    parallel = spec.config.parallel
    if store is not None:
        store.set(f"loaded{spec.rank}", "1")
        store.wait([f"loaded{rank}" for rank in range(parallel.ep)], LOADING_TIMEOUT)
    return ParallelGroups.create(
        spec.rank, parallel.ep, store, parallel.collective_timeout, interface=parallel.interface
    )


def assemble(
    spec: WorkerSpec, store: Store | None, channel: Channel, status: StatusPipe
) -> tuple[Rank, ParallelGroups]:
    """A rank, ready to step, and its group; reports each phase to ``status``.

    Raises:
        ValueError: a setting or the checkpoint is wrong; the text names it.
        RuntimeError: another rank did not come.
    """
    with status.phase("read config"):
        assembly = Assembly(spec, status)
    with status.phase("load weights"):
        weights = assembly.load_weights()
    with status.phase("meet the other ranks"):
        groups = meet(spec, store)
    with status.phase("build model"):
        chooser = assembly.copy_chooser(groups)
        model = assembly.build_model(weights, groups, chooser)
    return assembly.build_rank(model, groups, chooser, channel), groups
