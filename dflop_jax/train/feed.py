"""Batches ready to run: decoded, scheduled and packed in the background."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from dflop_jax.data import Loader, Sample, VisionSpec
from dflop_jax.data.packing import PackedGroup, pack_group
from dflop_jax.pipeline.step import GroupArrays
from dflop_jax.records import Plan, Schedule
from dflop_jax.schedule.worker import ScheduleWorker


@dataclass(frozen=True)
class Batch:
    """A global batch as the executor takes it, and what it cost to make."""

    step: int
    schedule: Schedule
    groups: tuple[GroupArrays, ...]
    supervised_tokens: int
    llm_tokens: int
    padding_fraction: dict[str, float]
    schedule_wait_s: float
    n_bad: int


def pack_batch(
    plan: Plan,
    spec: VisionSpec,
    schedule: Schedule,
    samples: Sequence[Sample],
    *,
    schedule_wait_s: float = 0.0,
    n_bad: int = 0,
) -> Batch:
    """Host arrays of a scheduled batch."""
    vision = plan.data_ranks("vision") if "vision" in plan.modules else 0
    llm = plan.data_ranks("llm")
    packed: list[tuple[int, PackedGroup]] = []
    capacity = {"vision": 0, "llm": 0}
    for group in schedule.groups:
        index = group[0].bucket
        bucket = plan.buckets[index]
        arrays = pack_group(
            group,
            bucket,
            samples,
            vision_ranks=vision,
            llm_ranks=llm,
            spec=spec,
            spread=plan.grouping == "balanced",
        )
        packed.append((index, arrays))
        capacity["vision"] += len(group) * vision * bucket.tiles
        capacity["llm"] += len(group) * llm * bucket.rows * bucket.tokens
    used = {
        "vision": sum(p.used_tiles for _, p in packed),
        "llm": sum(p.used_tokens for _, p in packed),
    }
    return Batch(
        step=schedule.step,
        schedule=schedule,
        groups=tuple(GroupArrays(b, p.fields, p.visual_index) for b, p in packed),
        supervised_tokens=sum(p.supervised_tokens for _, p in packed),
        llm_tokens=used["llm"],
        padding_fraction={
            m: 1.0 - used[m] / capacity[m] if capacity[m] else 0.0 for m in plan.modules
        },
        schedule_wait_s=schedule_wait_s,
        n_bad=n_bad,
    )


def feed(
    loader: Loader, worker: ScheduleWorker, plan: Plan, spec: VisionSpec, start_step: int
) -> Generator[tuple[Batch, float], None, None]:
    """(batch, seconds that training waited for its schedule) of each step, without end."""
    bad_before = 0

    def prepare(step: int, samples: list[Sample]) -> Batch:
        nonlocal bad_before
        schedule, wait_s = worker.get(step)
        bad, bad_before = loader.bad - bad_before, loader.bad
        return pack_batch(plan, spec, schedule, samples, schedule_wait_s=wait_s, n_bad=bad)

    with closing(loader.batches(start_step, prepare)) as batches:
        while True:
            asked = time.perf_counter()
            batch = next(batches)
            # The solver only costs training what was not hidden behind the batches ready ahead.
            yield batch, min(batch.schedule_wait_s, time.perf_counter() - asked)
