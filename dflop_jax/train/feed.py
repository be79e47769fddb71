"""Batches ready to run: scheduled, decoded and packed in the background, each process its part."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import jax
import msgspec
import numpy as np

from dflop_jax.cluster.ending import RunFailed
from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import Loader, Sample
from dflop_jax.data.packing import PackedGroup, Ranks, own_samples, pack_groups
from dflop_jax.pipeline.programs import GroupArrays, Programs
from dflop_jax.profile.needed import PieceFlops
from dflop_jax.records import Load, Plan, Schedule, from_json, to_json
from dflop_jax.report.spent import DATA, SAVE, SCHEDULE
from dflop_jax.report.trace import group_label
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.train.losses import BatchLoss, modules_with_loss
from dflop_jax.train.moved import BatchTraffic, moved
from dflop_jax.train.step_figures import imbalance

# Keys of what is sent ahead of the steps.
_FEED = "feed/"
_SCHEDULE, _BATCH = f"{_FEED}schedule", f"{_FEED}batch"


@dataclass(frozen=True)
class ReadyBatch:
    """A global batch as the executor takes it, and what it cost to make.

    `groups` hold this process's part, one for every group of the schedule; the counts are of the
    whole batch. `used_tokens` are those of pieces, by module, and `flops` what these need in a
    training step; `bad` are the samples that were first found undecodable.
    """

    step: int
    loads: tuple[Load, ...]
    schedule: Schedule
    groups: tuple[GroupArrays, ...]
    loss: BatchLoss
    used_tokens: dict[str, int]
    flops: dict[str, float]
    padding_fraction: dict[str, float]
    imbalance: dict[str, float]
    groups_run: dict[str, int]
    bad: list[int]
    moved: BatchTraffic

    @property
    def n_bytes(self) -> int:
        """Bytes of the arrays of this process's part."""
        arrays = [(g.fields, g.places) for g in self.groups]
        return sum(a.nbytes for a in jax.tree.leaves(arrays))


@dataclass(frozen=True)
class Waits:
    """Seconds that a process waited before a step: for its schedule, then for the rest of its
    batch, and for a save. Devices may have been at work meanwhile."""

    schedule_s: float
    data_s: float
    save_s: float = 0.0

    def of_devices(self, idle_s: float) -> dict[str, float]:
        """What these waits come to, by name, if devices idled so long."""
        idle: dict[str, float] = {}
        for name, s in ((SAVE, self.save_s), (SCHEDULE, self.schedule_s), (DATA, self.data_s)):
            idle[name] = min(s, idle_s)
            idle_s -= idle[name]
        return idle


@dataclass(frozen=True)
class _Counts:
    """What the processes add up of a batch."""

    bad: list[int]
    used_tokens: dict[str, int]
    flops: dict[str, float]
    loss_weights: dict[str, float]
    supervised_tokens: int
    moved: BatchTraffic


def own_ranks(programs: Programs) -> Ranks:
    """The data ranks that lie on this process's devices."""
    here = jax.process_index()
    filled: dict[str, set[int]] = {m: set() for m in programs.layout.modules}
    counted: dict[str, set[int]] = {m: set() for m in programs.layout.modules}
    for s in programs.segments.values():
        devices = np.moveaxis(s.mesh.devices, s.mesh.axis_names.index("data"), 0)
        for rank, of_rank in enumerate(devices.reshape(s.data_ranks, -1)):
            if any(d.process_index == here for d in of_rank):
                filled[s.plan.module].add(rank)
            if s.plan.first and of_rank[0].process_index == here:
                counted[s.plan.module].add(rank)
    return Ranks(filled, counted)


@dataclass(frozen=True)
class Packer:
    """Packs this process's part of scheduled batches; `needed` are FLOPs of a piece by module."""

    plan: Plan
    model: MultimodalModel
    ranks: Ranks
    peers: ProcessGroup
    needed: Mapping[str, PieceFlops]

    def own(self, schedule: Schedule, loads: Sequence[Load]) -> dict[int, frozenset[str]]:
        """Places in the batch of the samples that this process needs, and the modules of each."""
        return own_samples(self.plan.layout, schedule, loads, self.ranks)

    def pack(
        self,
        schedule: Schedule,
        loads: Sequence[Load],
        samples: Mapping[int, Sample],
        *,
        key: str,
        step: int,
        bad: Sequence[int] = (),
        draws: str = "",
    ) -> ReadyBatch:
        """Return the host arrays of a scheduled batch; `key` and `step` name it among the
        processes, `draws` what is drawn for its tokens (see `pack_groups`).

        Raises:
          RunFailed: the processes hold different schedules.
        """
        packed = pack_groups(
            self.plan.layout,
            schedule,
            samples,
            loads,
            model=self.model,
            ranks=self.ranks,
            draws=draws,
        )
        total = _agree(self.peers, key, step, schedule, self._counts(schedule, packed, bad))
        executed = dict.fromkeys(self.plan.layout.modules, 0)
        for g in schedule.groups:
            ranks = self.plan.layout.data_ranks(g.module)
            executed[g.module] += g.microbatches * ranks * g.shape.size
        return ReadyBatch(
            step=schedule.step,
            loads=tuple(loads),
            schedule=schedule,
            groups=tuple(
                GroupArrays(p.fields, p.places, total.moved.of_group(g, p.places))
                for g, p in enumerate(packed)
            ),
            loss=BatchLoss.of(self.model, total.loss_weights, total.supervised_tokens),
            used_tokens=total.used_tokens,
            flops=total.flops,
            padding_fraction={
                m: 1.0 - total.used_tokens[m] / n if n else 0.0 for m, n in executed.items()
            },
            imbalance=imbalance(self.plan.layout, schedule, loads),
            groups_run=dict(Counter(group_label(g) for g in schedule.groups)),
            bad=total.bad,
            moved=total.moved,
        )

    def _counts(
        self, schedule: Schedule, packed: Sequence[PackedGroup], bad: Sequence[int]
    ) -> _Counts:
        """This process's part of what is counted."""
        modules = self.plan.layout.modules
        used, flops = dict.fromkeys(modules, 0), dict.fromkeys(modules, 0.0)
        weights, supervised = dict.fromkeys(modules_with_loss(self.model), 0.0), 0
        for group, arrays in zip(schedule.groups, packed, strict=True):
            used[group.module] += arrays.used_tokens
            asked = map(self.needed[group.module], arrays.lengths, arrays.content)
            flops[group.module] += sum(asked)
            if group.module in weights:
                weights[group.module] += float(arrays.loss_weights.sum(dtype=np.float64))
            if group.module in [*weights][-1:]:
                supervised += int(np.count_nonzero(arrays.loss_weights))
        moved_here = moved(self.plan, self.model, schedule, packed, self.ranks.counts)
        return _Counts([*bad], used, flops, weights, supervised, moved_here)


def digest(schedule: Schedule) -> str:
    """Equal for schedules that run alike."""
    runs = schedule.groups, schedule.order
    data = msgspec.json.encode(
        runs, enc_hook=np.ndarray.tobytes
    )  # what compresses may differ between hosts
    return hashlib.sha256(data).hexdigest()[:16]


def _agree(
    peers: ProcessGroup, key: str, step: int, schedule: Schedule, counts: _Counts
) -> _Counts:
    """Add up everybody's counts, after a check that all run the same schedule."""
    parts = peers.gather(key, msgspec.json.encode((digest(schedule), counts)), step=step)
    total = counts
    if peers.is_hub:
        rows = [msgspec.json.decode(v, type=tuple[str, _Counts]) for v in parts]
        for process, (theirs, _) in enumerate(rows):
            if theirs != rows[0][0]:
                raise RunFailed(
                    f"step {schedule.step}: process {process} has schedule {theirs}, process 0 "
                    f"has {rows[0][0]}; all must run the same program on the same data"
                )
        every = [c for _, c in rows]
        total = _Counts(
            sorted({place for c in every for place in c.bad}),
            {m: sum(c.used_tokens[m] for c in every) for m in counts.used_tokens},
            {m: sum(c.flops[m] for c in every) for m in counts.flops},
            {m: sum(c.loss_weights[m] for c in every) for m in counts.loss_weights},
            sum(c.supervised_tokens for c in every),
            BatchTraffic.total([c.moved for c in every]),
        )
    shared = peers.broadcast(key, msgspec.json.encode(total), step=step)
    return msgspec.json.decode(shared, type=_Counts)


class Schedules:
    """One schedule per step on every process: solved on process 0, sent to the others as bytes."""

    def __init__(self, peers: ProcessGroup, worker: ScheduleWorker | None):
        self._peers, self._worker = peers, worker

    def get(self, step: int) -> tuple[Schedule, float]:
        """Return the schedule of a step and the seconds waited for its solver; ValueError when it
        cannot be scheduled."""
        if self._worker is None:
            data, wait_s = self._peers.broadcast(_SCHEDULE, step=step), 0.0
        else:
            solved, wait_s = self._worker.get(step)
            data = self._peers.broadcast(_SCHEDULE, to_json(solved), step=step)
        return from_json(data, Schedule), wait_s


def feed(
    loader: Loader, schedules: Schedules, packer: Packer, steps: range
) -> Generator[tuple[ReadyBatch, Waits], None, None]:
    """Yield the batch of each of the steps, with what training waited for it."""
    scheduled: dict[int, tuple[Schedule, float, list[Load]]] = {}

    def select(step: int) -> dict[int, frozenset[str]]:
        schedule, wait_s = schedules.get(step)
        loads = loader.loads(step)
        scheduled[step] = schedule, wait_s, loads
        return packer.own(schedule, loads)

    def prepare(step: int, samples: dict[int, Sample]) -> tuple[ReadyBatch, float]:
        schedule, wait_s, loads = scheduled.pop(step)
        bad = loader.replaced.found(range(step, step + 1))
        draws = f"{loader.seed}/{step}"
        batch = packer.pack(schedule, loads, samples, key=_BATCH, step=step, bad=bad, draws=draws)
        loader.replaced.add(step, batch.bad)
        return batch, wait_s

    batches = loader.batches(steps, prepare, select)
    try:
        asked_s = time.perf_counter()
        for batch, wait_s in batches:
            # The solver only costs training what was not hidden behind the batches ready ahead.
            waited_s = time.perf_counter() - asked_s
            schedule_s = min(wait_s, waited_s)
            yield batch, Waits(schedule_s, waited_s - schedule_s)
            asked_s = time.perf_counter()
    finally:
        packer.peers.abandon(_FEED)  # the others may have stopped before they sent all
        batches.close()
