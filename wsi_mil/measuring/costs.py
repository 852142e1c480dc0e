"""What a MIL method costs: seconds and memory of a training step and an evaluation, measured in a process of its own.

The process is fresh, so its peak (VmHWM) is that of the method, Python and its libraries included; and a method that
crashes, is killed or takes too long ends its own process alone.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from wsi_mil.bags import Bag, BagBatch, pack
from wsi_mil.errors import UserError
from wsi_mil.fitting.datasets import sample_tiles
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.methods import MethodSpec, build
from wsi_mil.models._base import MILModel, Objective, Progress
from wsi_mil.tasks import class_task

PACKED = (500, 2000, 800, 3500, 1200, 100, 1600, 300)
"""Tiles of the eight unequal bags that are trained packed and one by one."""
_ROUNDS, _ENOUGH_S = 5, 2.0


@dataclass(frozen=True, kw_only=True)
class CostJob:
    """What to measure. Travels to another process."""

    method: MethodSpec
    tiles: int | None
    """Of the one bag; None compares a packed batch with single bags."""
    width: int
    threads: int | None = None
    """Of torch; as many as it takes by itself when not given."""


@dataclass(frozen=True, kw_only=True)
class MethodCost:
    """What was measured; None where it was not. Times are the least of several, in seconds: of the clock, and of the
    processor (all threads together), which what else the machine does hardly changes. Memory is in MiB.
    """

    train_s: float | None = None
    train_cpu_s: float | None = None
    train_mib: int | None = None
    eval_s: float | None = None
    eval_cpu_s: float | None = None
    eval_mib: int | None = None
    packed_ratio: float | None = None
    """Processor time of a forward and backward pass over eight bags at once, over that of the eight one by one."""


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """Why there is no figure."""

    outcome: str
    """refused, failed, killed or over the limit."""
    reason: str


def measure_apart(job: CostJob, *, limit: float) -> MethodCost | Unmeasured:
    """Measure in a fresh process that is ended after `limit` seconds."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_for, args=(sender, job), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            return Unmeasured(outcome="over the limit", reason=f"not done after {limit:g} s")
        found: MethodCost | Unmeasured = receiver.recv()
        return found
    except EOFError:
        process.join()
        return Unmeasured(
            outcome="killed", reason=f"the process ended with {process.exitcode}; is there enough memory?"
        )
    finally:
        process.kill()
        process.join()
        receiver.close()


def measure(job: CostJob) -> MethodCost:
    """Measure in this process; its peak memory is then that of all it ever did."""
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    task = class_task("cost", ("a", "b"))
    model, objective = build(job.method, in_dim=job.width, task=task, seed=0)
    if job.tiles is None:
        return _compare(model, objective, job.width)
    bag = made_up_bag(job.tiles, job.width, seed=0)
    eval_s, eval_cpu_s = _evaluate(model, bag)
    eval_mib = peak_mib()
    train_s, train_cpu_s = _least(_step(model, objective, pack([_sampled(bag, objective)])))
    return MethodCost(
        train_s=train_s,
        train_cpu_s=train_cpu_s,
        train_mib=peak_mib(),
        eval_s=eval_s,
        eval_cpu_s=eval_cpu_s,
        eval_mib=eval_mib,
    )


def _evaluate(model: MILModel, bag: Bag) -> tuple[float, float]:
    """Wall and processor seconds of one answer. Its own copy of the bag is gone before training is measured."""
    whole = pack([bag])
    model.eval()
    with torch.no_grad():
        model(pack([bag.take(torch.arange(min(len(bag), 64)))]))  # what is set up once is not counted
        return _least(lambda: model(whole))


def made_up_bag(tiles: int, width: int, *, seed: int) -> Bag:
    """A bag of random features on a square grid."""
    generator = torch.Generator().manual_seed(seed)
    rows, side = torch.arange(tiles), math.ceil(math.sqrt(tiles))
    grid_xy = torch.stack([rows % side, rows // side], dim=1)
    return Bag(
        features=torch.randn(tiles, width, generator=generator),
        coords_l0=grid_xy * 448,
        grid_xy=grid_xy,
        slide_index=torch.zeros(tiles, dtype=torch.int64),
        slide_ids=(f"bag{seed}",),
        id=f"bag{seed}",
    )


def peak_mib() -> int | None:
    """Most memory that this process ever held; None where the system does not tell (other than Linux)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), None)


def _measure_for(sender: Connection, job: CostJob) -> None:
    keep_freed_memory()
    try:
        sender.send(measure(job))
    except UserError as error:
        sender.send(Unmeasured(outcome="refused", reason=str(error)))
    except Exception as error:
        sender.send(Unmeasured(outcome="failed", reason=f"{type(error).__name__}: {error}"))


def _compare(model: MILModel, objective: Objective, width: int) -> MethodCost:
    """Take turns, so that what else the machine does falls on both."""
    if model.loops_over_bags:
        return MethodCost()
    bags = [_sampled(made_up_bag(n, width, seed=i), objective) for i, n in enumerate(PACKED)]
    together, alone = pack(bags), [pack([bag]) for bag in bags]
    packed, single = [], []
    for _ in range(_ROUNDS):
        packed.append(_seconds(lambda: _backward(model, objective, [together]))[1])
        single.append(_seconds(lambda: _backward(model, objective, alone))[1])
    return MethodCost(packed_ratio=min(packed) / min(single))


def _sampled(bag: Bag, objective: Objective) -> Bag:
    """What training gives the method of a bag."""
    return sample_tiles(bag, objective.tiles_per_bag, seed=0, epoch=0, position=0)


def _step(model: MILModel, objective: Objective, batch: BagBatch) -> Callable[[], None]:
    """One step as training takes it, with its optimiser, on bags of which every second is positive."""
    optimizer = objective.optimizer(model, lr=1e-4, weight_decay=1e-5)
    if optimizer is None:
        groups = [dict(group) for group in objective.parameter_groups(model)]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=1e-5)

    def step() -> None:
        _backward(model, objective, [batch])
        optimizer.step()
        optimizer.zero_grad()
        objective.after_optimizer_step(model, batch, 1e-4)

    return step


def _backward(model: MILModel, objective: Objective, batches: Sequence[BagBatch]) -> None:
    model.train()
    objective.train()
    for batch in batches:
        target = torch.ones(len(batch), dtype=torch.int64)
        target[1::2] = 0
        progress = Progress(step=1, total_steps=2, generator=torch.Generator().manual_seed(0))
        terms = objective.loss(model, batch, target, progress)
        torch.autograd.backward(torch.stack(list(terms.values())).sum())


def _least(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of the processor: the least of up to five times, of one where that is long."""
    found = [_seconds(work)]
    while len(found) < _ROUNDS and sum(cpu for _, cpu in found) < _ENOUGH_S:
        found.append(_seconds(work))
    return min(wall for wall, _ in found), min(cpu for _, cpu in found)


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu
