"""Puts the placement control of a rank together, and says what people may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from moeserve import config
from moeserve.control.controller import Controller, gather_digests
from moeserve.control.judge import CostModel
from moeserve.control.manager import Manager, Policy
from moeserve.control.planner_client import PlannerClient
from moeserve.control.proposals import Machine
from moeserve.experts.load import LoadCounter
from moeserve.experts.mover import ExpertMover
from moeserve.experts.split import CopyChooser
from moeserve.experts.store import ExpertStore
from moeserve.experts.traffic import Traffic
from moeserve.parallel.groups import ParallelGroups
from moeserve_placement import Placement


def make_manager(experts: config.ExpertConfig, store: ExpertStore, top_k: int) -> Manager:
    """The manager of rank 0. It acts by itself only with ``enable_eplb``."""
    minute = experts.minute_bytes
    policy = Policy(
        is_active=experts.enable_eplb,
        planner=experts.planner,
        window_tokens=experts.window_tokens,
        interval_s=experts.rebalance_interval,
        min_balancedness=experts.min_balancedness,
        minute_bytes=None if minute is None else config.parse_bytes("minute_bytes", minute),
        is_dry_run=experts.rebalance_dry_run,
        split="local"
        if experts.expert_split == "auto" and not experts.enable_eplb
        else experts.expert_split,
        top_k=top_k,
        costs=CostModel(horizon_s=experts.rebalance_horizon),
    )
    machine = Machine(list(store.layers), store.slot_map.num_experts, store.expert_bytes)
    return Manager(policy, store, PlannerClient(machine))


def make_controller(
    groups: ParallelGroups,
    experts: config.ExpertConfig,
    store: ExpertStore,
    load: LoadCounter,
    traffic: Traffic,
    chooser: CopyChooser,
    manager: Manager | None,
) -> Controller:
    """The controller of one rank; all ranks make theirs together, they exchange digests."""
    own = {
        (layer, expert): store.digest(layer, slot)
        for layer in store.layers
        for slot, expert in enumerate(store.logical(layer))
        if expert is not None
    }
    mover = ExpertMover(store, groups.all_to_all, groups.world_size, gather_digests(groups, own))
    return Controller(
        groups=groups,
        load=load,
        traffic=traffic,
        mover=mover,
        chooser=chooser,
        step_bytes=config.parse_bytes("step_bytes", experts.step_bytes),
        decider=manager,
    )


class _Rebalance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    planner: str | None = None
    dry_run: bool = False


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_experts: int
    layers: dict[int, tuple[tuple[int | None, ...], ...]]


class _Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int | None = None


class _Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layer: int
    expert: int


def commands(manager: Manager) -> Mapping[str, Callable[[bytes], object]]:
    """What may be commanded, by name; each takes JSON and raises ValueError where it is wrong."""

    def rebalance(body: bytes) -> object:
        wish = msgspec.json.decode(body, type=_Rebalance)
        return manager.rebalance(wish.planner, is_dry_run=wish.dry_run)

    def place(body: bytes) -> object:
        wish = msgspec.json.decode(body, type=_Place)
        return manager.place(Placement(num_experts=wish.num_experts, layers=wish.layers))

    def rollback(body: bytes) -> object:
        return manager.rollback(msgspec.json.decode(body, type=_Rollback).id)

    def freeze(body: bytes) -> object:
        manager.is_frozen = True
        return state(manager)

    def unfreeze(body: bytes) -> object:
        manager.is_frozen = False
        return state(manager)

    def pin(body: bytes) -> object:
        wish = msgspec.json.decode(body, type=_Pin)
        manager.pin(wish.layer, wish.expert)
        return state(manager)

    def unpin(body: bytes) -> object:
        wish = msgspec.json.decode(body, type=_Pin)
        manager.unpin(wish.layer, wish.expert)
        return state(manager)

    def cancel(body: bytes) -> object:
        manager.cancel()
        return state(manager)

    return {
        "rebalance": rebalance,
        "place": place,
        "rollback": rollback,
        "freeze": freeze,
        "unfreeze": unfreeze,
        "pin": pin,
        "unpin": unpin,
        "cancel": cancel,
    }


def state(manager: Manager) -> dict[str, object]:
    """The manager's state, for people."""
    window = manager.window
    return {
        "is_active": manager.policy.is_active,
        "is_frozen": manager.is_frozen,
        "is_dry_run": manager.policy.is_dry_run,
        "planner": manager.policy.planner,
        "pins": [{"layer": layer, "expert": expert} for layer, expert in sorted(manager.pins)],
        "imbalance": None if window is None else window.imbalance,
        "expert_share": None if window is None else window.expert_share,
        "split_from": manager.split_from,
        "num_bad_windows": manager.num_bad_windows,
        "decisions": dict(manager.log.counts),
    }


def history(manager: Manager) -> Callable[[], object]:
    """The manager's state and its decisions, the newest first."""
    return lambda: {**state(manager), "entries": list(manager.log)}
