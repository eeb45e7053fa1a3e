"""Train the embedded model on a CPU: one process per core, parameters in shared memory.

The learning rate, the window length and the mix follow the wall clock, so a run of given
minutes ends with a decayed learning rate however busy the machine is. Training is not
bit-reproducible; the same recipe gives a similar loss.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from .export import load_pretrained
from .model import ModelShape, TrainingModel
from .optimizer import MuonAdamW, ParameterSlot, own_slots, plan_slots
from .windows import FINAL_MIX, MAIN_MIX, WindowSampler

LOG_EVERY_STEPS = 10


@dataclass(slots=True, kw_only=True)
class Shared:
    """What the processes share: flat parameters, one gradient buffer each, and progress."""

    slots: list[ParameterSlot]
    parameters: Tensor
    gradients: list[Tensor]
    progress: Tensor  # [1], 0 to 1, written by rank 0
    barrier: Any


class Trainer:
    """One process of the run."""

    def __init__(self, rank: int, shared: Shared, args: argparse.Namespace) -> None:
        self.rank, self.shared, self.args = rank, shared, args
        self.model = attach_model(shared, rank)
        if args.eager:
            torch.compiler.set_stance("force_eager")
        else:
            self.model.compile_blocks()
        self.sampler = WindowSampler(args.tokens, seed=args.seed + rank)
        self.owned = own_slots(shared.slots, rank=rank, world_size=args.num_processes)
        self.optimizer = MuonAdamW(
            self.owned,
            shared.parameters,
            shape=self.model.shape,
            muon_lr=args.muon_lr,
            adam_lr=args.adam_lr,
            weight_decay=args.weight_decay,
        )
        self.num_tokens = 0

    def run(self) -> None:
        """Train until the time is over, and save this process's parameters."""
        self.compile_for_both_lengths()
        self.shared.barrier.wait()
        start, last_save, step = time.time(), time.time(), 0
        while (progress := self.agree_on_progress(start)) < 1:
            step += 1
            loss = self.train_step(progress)
            if self.rank == 0 and step % LOG_EVERY_STEPS == 0:
                self.log(step, progress, loss, time.time() - start)
            if time.time() - last_save > 60 * self.args.save_minutes:
                last_save = time.time()
                self.save()
        self.save()
        print(f"rank={self.rank} steps={step} cpu_s={time.process_time():.0f}", flush=True)

    def compile_for_both_lengths(self) -> None:
        """Run both window lengths once, so that compiling does not use training time."""
        for length in (self.args.short_length, self.args.long_length):
            self.compute_gradients(length, MAIN_MIX)

    def agree_on_progress(self, start: float) -> float:
        """Return the share of the time that has passed, the same in all processes."""
        if self.rank == 0:
            self.shared.progress[0] = min(1.0, (time.time() - start) / (60 * self.args.minutes))
        self.shared.barrier.wait()
        return float(self.shared.progress[0])

    def train_step(self, progress: float) -> float:
        """Compute gradients, meet, update the owned parameters, meet; return the loss."""
        args = self.args
        is_long = progress >= 1 - args.long_share
        length = args.long_length if is_long else args.short_length
        mix = FINAL_MIX if progress >= 1 - args.final_share else MAIN_MIX
        loss = self.compute_gradients(length, mix)
        self.shared.barrier.wait()
        self.optimizer.step(self.shared.gradients, lr_factor(progress, args))
        self.shared.barrier.wait()
        self.num_tokens += args.tokens_per_process // length * length * args.num_processes
        return loss

    def compute_gradients(self, length: int, mix: dict[str, float]) -> float:
        """Fill this process's gradient buffer from one batch; return the cross-entropy."""
        self.shared.gradients[self.rank].zero_()
        batch = self.args.tokens_per_process // length
        losses = self.model(self.sampler.draw(batch, length, mix))
        total = losses.cross_entropy + self.args.balance_weight * losses.balance
        (total + self.args.router_z_weight * losses.router_z).backward()
        return float(losses.cross_entropy.detach())

    def log(self, step: int, progress: float, loss: float, elapsed_s: float) -> None:
        """Print one line of progress."""
        print(
            f"step={step} progress={progress:.3f} tokens={self.num_tokens} loss={loss:.3f}"
            f" elapsed_s={elapsed_s:.0f} cpu_s={time.process_time():.0f}",
            flush=True,
        )

    def save(self) -> None:
        """Write the float32 masters of the owned parameters; the old file stays until then."""
        path = part_path(self.args.out, self.rank)
        temporary = path.with_suffix(".new")
        save_file({slot.name: self.optimizer.masters[slot.name] for slot in self.owned}, temporary)
        temporary.replace(path)


def lr_factor(progress: float, args: argparse.Namespace) -> float:
    """Return the learning rate factor: linear warm-up, constant, linear decay to zero."""
    if progress < 1 - args.decay_share:
        return float(min(1.0, progress / args.warmup_share))
    return float((1 - progress) / args.decay_share)


def part_path(out: Path, rank: int) -> Path:
    """Return the file of one process."""
    return out / f"part{rank}.safetensors"


def attach_model(shared: Shared, rank: int) -> TrainingModel:
    """Return a model whose parameters and gradients are views of the shared buffers."""
    model = TrainingModel(ModelShape())
    for slot, parameter in zip(shared.slots, model.parameters(), strict=True):
        parameter.data = slot.view(shared.parameters)
        parameter.grad = slot.view(shared.gradients[rank])
    return model


def make_shared(args: argparse.Namespace, barrier: Any) -> Shared:
    """Return shared buffers that hold the starting parameters."""
    torch.manual_seed(args.seed)
    model = TrainingModel(ModelShape())
    slots, length = plan_slots(model)
    start = load_pretrained(args.init) if args.init else model.state_dict()
    dtype = getattr(torch, args.dtype)
    parameters = torch.zeros(length, dtype=dtype).share_memory_()
    for slot in slots:
        slot.view(parameters).copy_(start[slot.name])
    return Shared(
        slots=slots,
        parameters=parameters,
        gradients=[torch.zeros_like(parameters).share_memory_() for _ in range(args.num_processes)],
        progress=torch.zeros(1).share_memory_(),
        barrier=barrier,
    )


def run_process(rank: int, shared: Shared, args: argparse.Namespace) -> None:
    """Run one process of the training, on one thread."""
    torch.set_num_threads(1)
    Trainer(rank, shared, args).run()


def merge_parts(out: Path, num_processes: int) -> None:
    """Write trained.safetensors, the float32 parameters of all processes."""
    merged: dict[str, Tensor] = {}
    for rank in range(num_processes):
        merged |= load_file(part_path(out, rank))
    save_file(merged, out / "trained.safetensors")


def parse_args() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tokens", type=Path, required=True, help="folder with DOMAIN.train.bin")
    add("--out", type=Path, required=True)
    add("--init", type=Path, help="checkpoint folder to start from; random without it")
    add("--minutes", type=float, default=110)
    add("--save-minutes", type=float, default=4)
    add("--num-processes", type=int, default=2)
    add("--tokens-per-process", type=int, default=4096, help="per step")
    add("--short-length", type=int, default=256)
    add("--long-length", type=int, default=1024)
    add("--long-share", type=float, default=0.2, help="last part of the time with long windows")
    add("--final-share", type=float, default=0.15, help="last part with the chat-heavy mix")
    add("--muon-lr", type=float, default=2.5e-3)
    add("--adam-lr", type=float, default=4e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--warmup-share", type=float, default=0.03)
    add("--decay-share", type=float, default=0.7)
    add("--balance-weight", type=float, default=0.01)
    add("--router-z-weight", type=float, default=1e-4)
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--seed", type=int, default=100)
    add("--eager", action="store_true", help="do not compile; slower, but starts at once")
    return parser.parse_args()


def main() -> None:
    """Start one process per core and merge what they saved."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    shared = make_shared(args, context.Barrier(args.num_processes))
    processes = [
        context.Process(target=run_process, args=(rank, shared, args))
        for rank in range(args.num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a training process failed")
    merge_parts(args.out, args.num_processes)


if __name__ == "__main__":
    main()
