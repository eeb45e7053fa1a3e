"""The chips that kernels are made for, and what each can do: the only place that asks.

Kernels take capabilities as constexpr, so that one source serves all. Shared memory is the most
that one program may have; neither compiler checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Target:
    """One chip.

    name: as in the tile tables. kind: "cuda", "hip" or "interpret". arch: as Triton names it.
    shared_memory: bytes that a program can have. num_sms: processors; a guess until a device says.
    tma: loads through tensor descriptors pay. swap: tiles of under 64 rows need the weights as
    first operand to use the fast matrix instruction (wgmma). fp8: the compiler takes e4m3.
    """

    name: str
    kind: str
    arch: int | str
    warp_size: int
    shared_memory: int
    num_sms: int
    tma: bool = False
    swap: bool = False
    fp8: bool = True


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * 1024, 108, fp8=False),
        Target("sm_90", "cuda", 90, 32, 227 * 1024, 132, tma=True, swap=True),
        Target("sm_100", "cuda", 100, 32, 227 * 1024, 148, tma=True),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024, 304),
        Target("gfx950", "hip", "gfx950", 64, 160 * 1024, 256),
    )
}
# The interpreter takes any kernel; TMA and operand swap are tried by asking for them in a tile.
INTERPRET = Target("interpret", "interpret", 0, 32, 1 << 30, 4, tma=True, swap=True)


def target_of(device: torch.device) -> Target:
    """The target of tensors on ``device``; of the CPU it is the interpreter.

    Raises:
        ValueError: a GPU that no table knows.
    """
    if device.type == "cpu":
        return INTERPRET
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        major = properties.major
        # Ada (8.9) and Ampere (8.x) run what is made for 8.0, later Blackwells what is for 10.0.
        name = {8: "sm_80", 9: "sm_90"}.get(major, "sm_100" if major >= 10 else f"sm_{major}0")
    if name not in TARGETS:
        raise ValueError(f"device = {device}: a {name}, must be one of {', '.join(TARGETS)}")
    target = replace(TARGETS[name], num_sms=properties.multi_processor_count)
    shared = getattr(properties, "shared_memory_per_block_optin", target.shared_memory)
    return replace(target, shared_memory=min(shared, target.shared_memory))
