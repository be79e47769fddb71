"""Batches ready to run: scheduled, decoded and packed in the background, each process its part."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import jax
import msgspec

from dflop_jax.cluster.peers import Peers, RunFailed
from dflop_jax.data import Loader, MediaSpec, Sample
from dflop_jax.data.packing import PackedGroup, Ranks, own_samples, pack_group
from dflop_jax.pipeline.programs import GroupArrays, Programs
from dflop_jax.records import Plan, SampleShape, Schedule
from dflop_jax.schedule.online import capacity_of
from dflop_jax.schedule.worker import ScheduleWorker

_FEED = "feed/"  # begins the keys of what is sent ahead of the steps


@dataclass(frozen=True)
class Batch:
    """A global batch as the executor takes it, and what it cost to make.

    `groups` hold this process's part; the counts are of the whole batch.
    """

    step: int
    shapes: tuple[SampleShape, ...]
    schedule: Schedule
    groups: tuple[GroupArrays, ...]
    supervised_tokens: int
    llm_tokens: int
    padding_fraction: dict[str, float]
    groups_run: dict[str, int]
    n_bad: int


def own_ranks(programs: Programs) -> Ranks:
    """The data ranks that lie on this process's devices."""
    here = jax.process_index()
    held: dict[str, set[int]] = {m: set() for m in programs.plan.modules}
    counted: dict[str, set[int]] = {m: set() for m in programs.plan.modules}
    for s in programs.segments.values():
        module, devices = s.plan.module, s.mesh.devices
        for rank in range(s.data_ranks):
            if any(d.process_index == here for d in devices[:, rank].flat):
                held[module].add(rank)
        if s.plan.first:
            counted[module] |= {
                r for r in range(s.data_ranks) if devices[0, r, 0].process_index == here
            }
    return Ranks(held, counted)


@dataclass(frozen=True)
class Packer:
    """Packs this process's part of scheduled batches."""

    plan: Plan
    spec: MediaSpec
    ranks: Ranks
    peers: Peers

    def own(self, schedule: Schedule, shapes: Sequence[SampleShape]) -> list[int]:
        """Places in the batch of the samples that this process needs."""
        spread = self.plan.grouping == "balanced"
        return own_samples(
            schedule, self.plan.buckets, shapes, self._data_ranks, spread, self.ranks
        )

    @property
    def _data_ranks(self) -> dict[str, int]:
        return {m: self.plan.data_ranks(m) for m in self.plan.modules}

    def pack(
        self,
        schedule: Schedule,
        shapes: Sequence[SampleShape],
        samples: Mapping[int, Sample],
        *,
        key: str,
        n_bad: int = 0,
    ) -> Batch:
        """Host arrays of a scheduled batch; `key` names it among the processes.

        Raises:
          RunFailed: the processes hold different schedules.
        """
        plan, room = self.plan, capacity_of(self.plan)
        packed: list[tuple[int, PackedGroup]] = []
        capacity = dict.fromkeys(plan.modules, 0)
        for group in schedule.groups:
            index = group[0].bucket
            bucket = plan.buckets[index]
            arrays = pack_group(
                group,
                bucket,
                samples,
                shapes=shapes,
                data_ranks=self._data_ranks,
                spec=self.spec,
                spread=plan.grouping == "balanced",
                ranks=self.ranks,
            )
            packed.append((index, arrays))
            for m in plan.modules:
                capacity[m] += room.room(bucket, m)
        counts = _agree(
            self.peers,
            key,
            schedule,
            (
                n_bad,
                sum(p.supervised_tokens for _, p in packed),
                *(sum(p.used[m] for _, p in packed) for m in plan.modules),
            ),
        )
        used = dict(zip(plan.modules, counts[2:], strict=True))
        return Batch(
            step=schedule.step,
            shapes=tuple(shapes),
            schedule=schedule,
            groups=tuple(GroupArrays(b, p.fields, p.sources) for b, p in packed),
            supervised_tokens=counts[1],
            llm_tokens=used["llm"],
            padding_fraction={
                m: 1.0 - used[m] / capacity[m] if capacity[m] else 0.0 for m in plan.modules
            },
            groups_run=dict(Counter(plan.buckets[b].name for b, _ in packed)),
            n_bad=counts[0],
        )


def digest(schedule: Schedule) -> str:
    """Equal for schedules that run alike."""
    return hashlib.sha256(msgspec.json.encode(schedule.groups)).hexdigest()[:16]


def _agree(peers: Peers, key: str, schedule: Schedule, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Everybody's counts added up, after a check that all run the same schedule."""
    found = peers.gather(f"{key}/counts", msgspec.json.encode((digest(schedule), counts)))
    total = counts
    if peers.is_hub:
        rows = [msgspec.json.decode(v, type=tuple[str, tuple[int, ...]]) for v in found]
        for process, (theirs, _) in enumerate(rows):
            if theirs != rows[0][0]:
                raise RunFailed(
                    f"step {schedule.step}: process {process} has schedule {theirs}, process 0 "
                    f"has {rows[0][0]}; all must run the same program on the same data"
                )
        total = tuple(sum(column) for column in zip(*(c for _, c in rows)))
    shared = peers.share(f"{key}/total", msgspec.json.encode(total))
    return msgspec.json.decode(shared, type=tuple[int, ...])


class Schedules:
    """One schedule per step on every process: solved on process 0, sent to the others as bytes."""

    def __init__(self, peers: Peers, worker: ScheduleWorker | None):
        self._peers, self._worker = peers, worker

    def get(self, step: int) -> tuple[Schedule, float]:
        """(schedule, seconds waited for its solver); ValueError when it cannot be scheduled."""
        key = f"{_FEED}schedule/{step}"
        if self._worker is None:
            data, wait_s = self._peers.share(key), 0.0
        else:
            solved, wait_s = self._worker.get(step)
            data = self._peers.share(key, msgspec.json.encode(solved))
        return msgspec.json.decode(data, type=Schedule), wait_s


def feed(
    loader: Loader, schedules: Schedules, packer: Packer, steps: range
) -> Generator[tuple[Batch, float], None, None]:
    """(batch, seconds that training waited for its schedule) of each of the steps."""
    bad_before = 0
    scheduled: dict[int, tuple[Schedule, float, list[SampleShape]]] = {}

    def select(step: int) -> list[int]:
        schedule, wait_s = schedules.get(step)
        shapes = loader.shapes(step)
        scheduled[step] = schedule, wait_s, shapes
        return packer.own(schedule, shapes)

    def prepare(step: int, samples: dict[int, Sample]) -> tuple[Batch, float]:
        nonlocal bad_before
        schedule, wait_s, shapes = scheduled.pop(step)
        bad, bad_before = loader.bad - bad_before, loader.bad
        key = f"{_FEED}batch/{step}"
        batch = packer.pack(schedule, shapes, samples, key=key, n_bad=bad)
        return batch, wait_s

    batches = loader.batches(steps, prepare, select)
    try:
        asked = time.perf_counter()
        for batch, wait_s in batches:
            # The solver only costs training what was not hidden behind the batches ready ahead.
            yield batch, min(wait_s, time.perf_counter() - asked)
            asked = time.perf_counter()
    finally:
        packer.peers.abandon(_FEED)  # the others may have stopped before they sent all
        batches.close()
