"""Schedules, decodes and packs batches in the background; each process packs its part."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflop_jax.contract import MultimodalModel
from dflop_jax.data import Loader, Sample
from dflop_jax.data.content import features_struct
from dflop_jax.data.packing import LocalRanks, PackedGroup, local_samples, pack_groups
from dflop_jax.distributed.hang_watch import Sections
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.profile.needed import PieceFlops
from dflop_jax.records import Load, Plan, Schedule, crossing_traffic, rank_nodes
from dflop_jax.report.trace import group_label
from dflop_jax.report.wall_time import DATA, SAVE, SCHEDULE, TRAINING
from dflop_jax.runtime.programs import GroupArrays, Programs
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.train.step_figures import max_by_name, measure_imbalance, sum_by_name

FIRST_STEP = "first step"  # the section of a first step
WEIGHTS = "weights"  # the field that a module with a loss reads
_FEED = "feed/"  # prefix of the messages that are sent before a step needs them


def modules_with_loss(model: MultimodalModel) -> tuple[str, ...]:
    return tuple(
        name
        for name, module in model.modules.items()
        if any(WEIGHTS in names for names in module.inputs.values())
    )


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a global batch: each module's sum over its denominator, weighted and summed."""

    denominators: dict[str, float]  # by module with a loss, the sum of its token weights
    factors: dict[str, float]  # by module with a loss, the weight of its mean loss

    @classmethod
    def for_model(cls, model: MultimodalModel, denominators: Mapping[str, float]) -> BatchLoss:
        factors = {m: float(getattr(model.modules[m], "loss_weight", 1.0)) for m in denominators}
        return cls(dict(denominators), factors)

    @property
    def scales(self) -> dict[str, float]:
        """The factor of every token's loss, by module; arbitrary if no token has a weight."""
        return {m: self.factors[m] / (n or 1.0) for m, n in self.denominators.items()}

    @property
    def is_supervised(self) -> bool:
        return any(self.denominators.values())

    def means(self, sums: Mapping[str, float], name: str = "loss_sum") -> dict[str, float]:
        """Return each module's sum over the batch (`StepResult.sums`), over its denominator."""
        return {m: sums.get(f"{m}.{name}", 0.0) / (n or 1.0) for m, n in self.denominators.items()}

    def total(self, sums: Mapping[str, float]) -> float:
        """Return the loss that is trained on."""
        return sum(self.factors[m] * mean for m, mean in self.means(sums).items())


@dataclass(frozen=True)
class BatchCounts:
    """Counts of a batch, summed over processes. Traffic is by "source > target", forward."""

    bad: list[int]  # samples that were newly found undecodable
    used_tokens: dict[str, int]  # tokens without padding, by module
    flops: dict[str, float]  # FLOPs of these tokens in a training step, by module
    loss_weights: dict[str, float]  # by module with a loss, the sum over its tokens
    supervised_tokens: int  # of the last module with a loss
    # By "group/feeding group", the largest number of features that a rank reads from another rank:
    # see `ExchangeIndex.rounds`.
    max_requested: dict[str, int]
    in_node: dict[str, float]  # bytes that stay in a node
    across_nodes: dict[str, float]  # bytes between nodes

    @classmethod
    def total(cls, process_counts: Sequence[BatchCounts]) -> BatchCounts:
        def sum_of(name: str) -> dict[str, Any]:
            return sum_by_name(getattr(p, name) for p in process_counts)

        return cls(
            sorted({sample for p in process_counts for sample in p.bad}),
            sum_of("used_tokens"),
            sum_of("flops"),
            sum_of("loss_weights"),
            sum(p.supervised_tokens for p in process_counts),
            max_by_name(p.max_requested for p in process_counts),
            sum_of("in_node"),
            sum_of("across_nodes"),
        )


@dataclass(frozen=True)
class PackedBatch:
    """A global batch in the executor's form, and its metrics."""

    step: int
    loads: tuple[Load, ...]
    schedule: Schedule
    groups: tuple[GroupArrays, ...]  # this process's part of every group
    loss: BatchLoss
    counts: BatchCounts
    padding_fraction: dict[str, float]
    imbalance: dict[str, float]
    groups_run: dict[str, int]


@dataclass(frozen=True)
class Waits:
    """Seconds that a process waited before a step. Devices may have worked meanwhile."""

    schedule_s: float
    data_s: float
    save_s: float = 0.0

    def idle_by_cause(self, idle_s: float) -> dict[str, float]:
        """Split the seconds that devices idled among the causes."""
        idle: dict[str, float] = {}
        for name, s in ((SAVE, self.save_s), (SCHEDULE, self.schedule_s), (DATA, self.data_s)):
            idle[name] = min(s, idle_s)
            idle_s -= idle[name]
        return idle


def find_local_ranks(programs: Programs) -> LocalRanks:
    """Return the data ranks that are on this process's devices."""
    process = jax.process_index()
    filled: dict[str, set[int]] = {m: set() for m in programs.layout.modules}
    counted: dict[str, set[int]] = {m: set() for m in programs.layout.modules}
    for s in programs.segments.values():
        devices = np.moveaxis(s.mesh.devices, s.mesh.axis_names.index("data"), 0)
        for rank, rank_devices in enumerate(devices.reshape(s.data_ranks, -1)):
            if any(d.process_index == process for d in rank_devices):
                filled[s.plan.module].add(rank)
            if s.plan.first and rank_devices[0].process_index == process:
                counted[s.plan.module].add(rank)
    return LocalRanks(filled, counted)


@dataclass(frozen=True)
class Packer:
    """Packs this process's part of scheduled batches."""

    plan: Plan
    model: MultimodalModel
    ranks: LocalRanks
    peers: ProcessGroup
    needed: Mapping[str, PieceFlops]  # by module

    def find_needed_samples(self, schedule: Schedule, loads: Sequence[Load]) -> list[int]:
        """Return positions in the batch of the samples that this process needs."""
        return local_samples(self.plan.layout, schedule, loads, self.ranks)

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
    ) -> PackedBatch:
        """Return the host arrays of a scheduled batch; `key` and `step` name it in messages,
        `draws` is the seed of random draws for its tokens (see `pack_groups`)."""
        layout = self.plan.layout
        packed = pack_groups(
            layout, schedule, samples, loads, model=self.model, ranks=self.ranks, draws=draws
        )
        counts = self._count_tokens(schedule, packed, bad)
        counts_by_process = self.peers.gather(key, counts, BatchCounts, step=step)
        primary_total = BatchCounts.total(counts_by_process) if counts_by_process else None
        total = self.peers.broadcast(key, primary_total, BatchCounts, step=step)
        executed = schedule.count_tokens(layout)
        padding = {m: 1.0 - total.used_tokens[m] / n if n else 0.0 for m, n in executed.items()}
        groups: list[GroupArrays] = []
        for i, p in enumerate(packed):
            crossing = {f: total.max_requested[f"{i}/{f}"] for f in p.gathers}
            groups.append(GroupArrays(p.fields, p.gathers, crossing))
        return PackedBatch(
            step=schedule.step,
            loads=tuple(loads),
            schedule=schedule,
            groups=tuple(groups),
            loss=BatchLoss.for_model(self.model, total.loss_weights),
            counts=total,
            padding_fraction=padding,
            imbalance=measure_imbalance(layout, schedule, loads),
            groups_run=dict(Counter(group_label(g) for g in schedule.groups)),
        )

    def _count_tokens(
        self, schedule: Schedule, packed: Sequence[PackedGroup], bad: Sequence[int]
    ) -> BatchCounts:
        """Return the counts of this process's part."""
        modules = self.plan.layout.modules
        used_tokens, flops = dict.fromkeys(modules, 0), dict.fromkeys(modules, 0.0)
        weights, supervised = dict.fromkeys(modules_with_loss(self.model), 0.0), 0
        for group, arrays in zip(schedule.groups, packed, strict=True):
            used_tokens[group.module] += arrays.used_tokens
            piece_flops = map(self.needed[group.module], arrays.lengths, arrays.content)
            flops[group.module] += sum(piece_flops)
            if group.module in weights:
                weights[group.module] += float(arrays.loss_weights.sum(dtype=np.float64))
            if group.module in [*weights][-1:]:
                supervised += int(np.count_nonzero(arrays.loss_weights))
        traffic = self._count_traffic(schedule, packed)
        return BatchCounts([*bad], used_tokens, flops, weights, supervised, *traffic)

    def _count_traffic(
        self, schedule: Schedule, packed: Sequence[PackedGroup]
    ) -> tuple[dict[str, int], dict[str, float], dict[str, float]]:
        """Return the last three of `BatchCounts`, for features that this process's ranks read."""
        max_requested: dict[str, int] = {}
        in_node: dict[str, float] = defaultdict(float)
        across_nodes: dict[str, float] = defaultdict(float)
        for g, arrays in enumerate(packed):
            target = schedule.groups[g].module
            for f, reads in arrays.read_counts.items():
                feeder = schedule.groups[f]
                crossed = crossing_traffic(reads, rank_nodes(self.plan, feeder.module))
                max_requested[f"{g}/{f}"] = int(crossed.max_amount)
                link_counts = crossed.for_target_ranks(sorted(self.ranks.counted[target]))
                structs = (
                    features_struct(self.model.modules[feeder.module], edge, feeder.shape)
                    for edge in self.plan.layout.edges
                    if (edge.source, edge.target) == (feeder.module, target)
                )
                n_bytes = sum(s.shape[-1] * s.dtype.itemsize for s in structs)
                name = f"{feeder.module} > {target}"
                in_node[name] += n_bytes * link_counts.intra_node_amount
                across_nodes[name] += n_bytes * link_counts.inter_node_amount
        return max_requested, in_node, across_nodes


def feed_batches(
    loader: Loader, worker: ScheduleWorker | None, packer: Packer, steps: range
) -> Generator[tuple[PackedBatch, Waits], None, None]:
    """Yield the batch of each step, and the time that training waited for it."""
    scheduled: dict[int, tuple[Schedule, float, list[Load]]] = {}

    def select(step: int) -> list[int]:
        # A batch that cannot be scheduled raises ValueError here.
        solved, wait_s = worker.get(step) if worker else (None, 0.0)
        schedule = packer.peers.broadcast(f"{_FEED}schedule", solved, Schedule, step=step)
        loads = loader.loads(step)
        scheduled[step] = schedule, wait_s, loads
        return packer.find_needed_samples(schedule, loads)

    def prepare(step: int, samples: dict[int, Sample]) -> tuple[PackedBatch, float]:
        schedule, wait_s, loads = scheduled.pop(step)
        bad_samples = loader.replaced.bad_samples(range(step, step + 1))
        names = {"key": f"{_FEED}batch", "draws": f"{loader.seed}/{step}"}
        batch = packer.pack(schedule, loads, samples, step=step, bad=bad_samples, **names)
        loader.replaced.add_bad(step, batch.counts.bad)
        return batch, wait_s

    batches = loader.batches(steps, prepare, select)
    try:
        wait_start_s = time.perf_counter()
        for batch, wait_s in batches:
            # Solver time delays training only if it was not hidden behind batches that were ready.
            waited_s = time.perf_counter() - wait_start_s
            schedule_s = min(wait_s, waited_s)
            yield batch, Waits(schedule_s, waited_s - schedule_s)
            wait_start_s = time.perf_counter()
    finally:
        packer.peers.cancel_waits(_FEED)  # the others may have stopped before they sent all
        batches.close()


def mark_sections(
    sections: Sections, batches: Iterator[tuple[PackedBatch, Waits]], first_step: int
) -> Iterator[tuple[PackedBatch, Waits]]:
    """Yield the batches; the wait for each is a section, and the time until the next is a step."""
    for step in itertools.count(first_step):
        sections.begin(DATA)
        batch = next(batches, None)
        # A step's section includes the wait for the previous step; the first step has none.
        sections.begin(TRAINING if step > first_step else FIRST_STEP, step)
        if batch is None:
            return
        yield batch
