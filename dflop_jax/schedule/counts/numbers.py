"""The numbers of a batch, for the integer program of its counts (`program`).

Shape suffixes: N samples, C buckets, K size classes, M modules, R resources, D conditions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflop_jax.records import Layout, Prices
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.bounds.batch import Floor, floor_of, tails_s
from dflop_jax.schedule.counts.program import Sizes
from dflop_jax.schedule.groups import PackingSpace
from dflop_jax.schedule.solver.problem import Floats, Ints

_DIGITS = 9  # of numbers about 1: the last bits of a fit differ from machine to machine
PRICE = 1e-4  # of a step: what all groups together cost, so that none runs for nothing


@dataclass(frozen=True)
class Numbers:
    """`values` of the program's parameters, seconds in units of `unit_s`; the class of each sample
    and whether what is proved holds for every schedule (`is_bound`)."""

    values: dict[str, Floats]
    class_N: Ints
    unit_s: float
    is_bound: bool

    def with_slack(self, slack: float) -> Numbers:
        """Volumes larger by this share, since whole samples leave room."""
        larger = {name: (1 + slack) * self.values[name] for name in ("need", "least")}
        return replace(self, values=self.values | larger)

    def least_s(self, counts_C: Ints) -> float:
        """Seconds that a step of so many groups of each bucket takes at least, for the program."""
        v, some_C = self.values, counts_C > 0
        ends = [np.where((v["there"] > 0) & some_C, v[end], np.inf) for end in ("before", "after")]
        ends_R = sum(np.where(v["busy"] > 0, end.min(axis=1), 0.0) for end in ends)
        alone = (v["work"] @ counts_C + v["rest"] + ends_R).max()
        shared = v["shared"] @ counts_C + v["shared_rest"][0]
        return float(max(alone, shared)) * self.unit_s


def numbers_of(
    room: PackingSpace,
    layout: Layout,
    prices: Prices,
    trainable: Collection[str],
    sizes: Sizes,
    answer_C: Ints,
) -> Numbers | None:
    """Of a batch that may go to the buckets of `room`; `answer_C` are counts that hold it, by which
    it is told how tight a condition is. None where the program has too few buckets."""
    batch, buckets = room.batch, room.buckets
    if len(buckets) > sizes.buckets or not batch.n:
        return None
    floor = floor_of(batch, layout, prices, trainable)
    class_N = size_classes(batch, room.able_CN, sizes.classes)
    values = {name: np.zeros(shape) for name, shape in sizes.parameters.items()}
    n = slice(len(buckets))
    for k in range(sizes.classes):
        members = np.flatnonzero(class_N == k)
        if not len(members):
            continue
        values["count"][k] = len(members)
        values["able"][k, n] = len(members) * room.able_CN[:, members].any(axis=1)
        values["least"][:, k] = [batch.tokens[m][members].min() for m in layout.modules]
    values["holds"][:, n] = [
        [batch.room(b, m, room.capacity) * room.capacity.group_size for b in buckets]
        for m in layout.modules
    ]
    _fill_conditions(values, room, answer_C)
    unit_s = _fill_seconds(values, room, floor, answer_C)
    for m in range(len(layout.modules)):  # tokens over the largest bucket's
        largest = values["holds"][m].max() or 1.0
        values["holds"][m] /= largest
        values["least"][m] /= largest
    rounded = {name: np.round(value, _DIGITS) for name, value in values.items()}
    is_bound = sizes.divided <= 1 and _has_every_run(room)
    return Numbers(rounded, class_N, unit_s, is_bound)


def _has_every_run(room: PackingSpace) -> bool:
    """Whether what runs of a bucket is always one of the buckets: a module of which no sample in a
    microbatch has a piece has no group. (Nor has a part without pieces; of one divided module the
    buckets have every number of parts.)"""
    known = {bucket.shapes for bucket in room.buckets}
    for bucket in room.buckets:
        missing = set(room.batch.modules) - {m for m, _ in bucket.shapes}
        lacked = {absent for absent in room.batch.absences if missing <= absent}
        while more := {a & b for a in lacked for b in lacked} - lacked:
            lacked |= more  # what some samples that the bucket holds lack together
        left = (tuple((m, s) for m, s in bucket.shapes if m not in absent) for absent in lacked)
        if any(shapes and shapes not in known for shapes in left):
            return False
    return True


def _fill_conditions(values: dict[str, Floats], room: PackingSpace, answer_C: Ints) -> None:
    """The tightest conditions on volumes, each over its need."""
    wanted = room.demand
    room_DC = wanted.room_DC / wanted.need_D[:, None]
    tight = np.argsort(np.round(room_DC @ answer_C, _DIGITS), kind="stable")
    tight = tight[: len(values["need"])]
    values["need"][: len(tight)] = 1.0
    values["room"][: len(tight), : len(room.buckets)] = room_DC[tight]
    alone_C = np.ceil((1 / np.where(room_DC > 0, room_DC, np.inf)).max(axis=0, initial=0.0))
    values["most"][: len(room.buckets)] = 2 * np.maximum(alone_C, answer_C)


def _fill_seconds(
    values: dict[str, Floats],
    room: PackingSpace,
    floor: Floor,
    answer_C: Ints,
) -> float:
    """What groups take, in the unit of seconds that is returned."""
    n = slice(len(room.buckets))
    work_RC = np.array([floor.costs.bucket_s(b) for b in room.buckets]).T
    ends = [floor.ends({m: [s] for m, s in b.shapes}) for b in room.buckets]
    before_RC, after_RC = (np.array(end).T for end in zip(*ends, strict=True))
    there_RC = np.isfinite(before_RC)
    tail_RC = np.array(tails_s(after_RC, floor.reduce_R, floor.update_R, floor.awaited_R))
    # A resource that every answer uses: some sample fits only buckets that run there.
    busy_R = (there_RC[:, :, None] | ~room.able_CN).all(axis=1).any(axis=1)
    unit_s = float((work_RC @ answer_C).max()) or 1.0
    values["work"][:, n] = work_RC / unit_s
    values["rest"][:] = floor.content_R / unit_s
    values["before"][:, n] = np.where(there_RC, before_RC, 0.0) / unit_s
    values["after"][:, n] = np.where(there_RC, tail_RC, 0.0) / unit_s
    values["there"][:, n] = there_RC
    values["busy"][:] = busy_R
    for c, bucket in enumerate(room.buckets):
        shared = sum(floor.costs.static_s[m, s] @ floor.devices[m] for m, s in bucket.shapes)
        values["shared"][c] = shared / floor.concurrency / unit_s
    values["shared_rest"][0] = floor.shared_content / floor.concurrency / unit_s
    values["price"][n] = PRICE * work_RC.mean(axis=0) / unit_s
    return unit_s


def size_classes(batch: Batch, able_CN: NDArray[np.bool_], most: int) -> Ints:
    """[N]: classes of samples that the same buckets hold, smaller samples first, cut so that each
    has about as many tokens; of more kinds than `most` the last ones share a class."""
    _, kind_N = np.unique(able_CN, axis=1, return_inverse=True)
    kind_N = np.minimum(kind_N.ravel(), most - 1)
    tokens_MN = np.array([batch.tokens[m] for m in batch.modules]).reshape(-1, batch.n)
    size_N = (tokens_MN / np.maximum(tokens_MN.max(axis=1, keepdims=True), 1)).sum(axis=0)
    order = np.lexsort((size_N, kind_N))
    n_parts = most - int(kind_N.max())
    volume_N = np.cumsum(size_N[order]) - size_N[order] / 2
    part_N = np.floor(np.round(volume_N / (size_N.sum() or 1.0) * n_parts, _DIGITS))
    begins_N = (np.diff(kind_N[order]) > 0) | (np.diff(part_N) > 0)
    class_N = np.zeros(batch.n, np.int64)
    class_N[order[1:]] = np.cumsum(begins_N)
    return class_N
