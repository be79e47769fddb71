"""Candidates of the plan search: plans with a lower bound of, or an exact, makespan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dflop_jax.plan.bounds import Space
from dflop_jax.plan.evaluate import PlanEvaluator
from dflop_jax.plan.memory import MemoryOption, describe_savings, options_of, with_options
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.placement import layout_name
from dflop_jax.profile.state import Array
from dflop_jax.records import REMAT, Bucket, Group, Plan, Predicted, Prices, Schedule, Trace
from dflop_jax.schedule import BucketChoice
from dflop_jax.simulate.steps import makespan_function, simulate_step
from dflop_jax.simulate.task_graph import step_graph
from dflop_jax.simulate.task_order import textbook_order

Key = tuple[object, ...]  # orders candidates of equal makespan
# Candidates within this ratio of the fastest one get their buckets and options refined; a larger
# ratio takes more planning time but misses fewer good plans.
CLOSE_RATIO = 1.05
# Minimum share of the step time that a second recompute policy must save, since it doubles the
# programs to compile; with 0.02, useful ones are rejected.
MIN_SECOND_REMAT_GAIN = 0.01


@dataclass
class OneBucketSimulator:
    """Simulator of steps with a given number of identical groups, for a plan with one bucket."""

    plan: Plan
    content: Mapping[str, tuple[int, ...]]  # of one group, by module
    context: SearchContext
    sub_microbatches: Mapping[str, int]  # number per group of the other modules, by module
    _makespans: dict[int, float] = field(default_factory=dict)

    @cached_property
    def _priced(self) -> tuple[Prices, list[str]]:
        """Prices and trainable segments, computed only when the candidate is simulated."""
        layout = self.plan.layout
        return self.context.price_layout(layout), self.context.trainable(layout)

    def trace(self, n: int) -> Trace:
        return simulate_step(self.plan, Schedule(0, self._groups(n)), *self._priced)

    def _groups(self, n: int) -> tuple[Group, ...]:
        """Return `n` groups of every module with their sub-microbatches, without pieces."""
        layout, (bucket,) = self.plan.layout, self.plan.layout.buckets
        numbers: dict[str, range] = {}  # indices of each module's sub-microbatches
        size = 0
        for m, _ in bucket.shapes:
            numbers[m] = range(size, size + self.sub_microbatches[m])
            size = numbers[m].stop
        groups: list[Group] = []
        for first in range(0, n * size, max(size, 1)):
            for m, shape in bucket.shapes:
                readers = (i for t in layout.targets(m) for i in numbers.get(t, ()))
                feeds = tuple(first + i for i in readers)
                group = Group(m, shape, feeds, self.content[m], microbatches=layout.group_size)
                groups += [group] * len(numbers[m])
        return tuple(groups)

    def makespan_s(self, n: float) -> float:
        """Return the seconds of `n` groups, interpolated linearly between whole numbers."""
        below, above = math.floor(n), math.ceil(n)
        below_s, above_s = self._simulate_s(below), self._simulate_s(above)
        return below_s + (n - below) * (above_s - below_s)

    def _simulate_s(self, n: int) -> float:
        """Simulate once per number of groups and store only the makespan, no trace."""
        if n not in self._makespans:
            groups, (prices, trainable) = self._groups(n), self._priced
            graph = step_graph(self.plan.layout, groups, trainable)
            step = makespan_function(self.plan, Schedule(0, groups), graph, prices)
            self._makespans[n] = step(textbook_order(self.plan, graph, groups))
        return self._makespans[n]


@dataclass(frozen=True)
class Candidate:
    """A plan with its estimated step time, which the search refines from a bound to timings.

    A candidate from a space starts with undecided memory options and bounds from data volumes. The
    search counts its groups batch by batch, which raises the bounds; counting is expensive, and
    only a few of thousands of layouts need it. Then each choice of options becomes a candidate,
    whose makespan is exact once its groups are simulated. The fastest get refined buckets, run
    rounds, and finally have their programs timed.
    """

    plan: Plan  # with the simplest options while options are undecided
    groups_per_batch: int = 0  # that a mean batch takes with the one bucket
    lower_bound_s: float = 0.0  # of the mean makespan; the makespan itself if `is_exact`
    # (space, layout, granularity); None for a baseline, which is always exact.
    space_index: tuple[Space, int, int] | None = field(default=None, compare=False, repr=False)
    # Combinations of options that fit, {module: number of its option}, while undecided.
    fitting_options: Sequence[Mapping[str, int]] = field(default=(), compare=False, repr=False)
    # Lower bounds of each batch's makespan, [n_batches, n_options].
    batch_bounds_s: Array = field(default=None, compare=False, repr=False)
    # Number of groups; counted for the first `n_counted_batches`, lower bounds for the others.
    groups_by_batch: tuple[float, ...] = ()
    n_counted_batches: int = 0
    # None until options are chosen.
    simulator: OneBucketSimulator | None = field(default=None, compare=False, repr=False)
    is_exact: bool = True
    one_bucket_plan: Plan | None = None  # the plan that was ranked, if `plan` has other buckets
    max_microbatches: int = 0  # maximum per mean batch with the buckets of `plan`
    # How the buckets were chosen; None: they are derived from the one bucket.
    bucket_choice: BucketChoice | None = None
    round_seconds: tuple[float, ...] = ()  # by round; all candidates run the same rounds

    @staticmethod
    def from_space(space: Space, p: int, c: int) -> Candidate:
        """Return layout `p` of a space at granularity `c`, with undecided options."""
        groups = tuple(space.min_groups[:, p, c].tolist())
        options = space.fitting_options(p, c)
        candidate = Candidate(
            space.plan(p, c),
            int(space.groups_per_batch[c]),
            space_index=(space, p, c),
            fitting_options=options,
            groups_by_batch=groups,
            is_exact=False,
        )
        return candidate._with_bounds(space.batch_bounds_s(p, c, options, groups))

    @property
    def policy(self) -> str:
        return self.plan.policy

    @cached_property
    def name(self) -> str:
        return layout_name(self.plan.layout)

    @property
    def saving(self) -> str:
        """Description of the modules' memory options; "none" if they save nothing."""
        return describe_savings(self.plan.layout)

    @property
    def microbatches(self) -> int:
        """Microbatches per mean batch with the one bucket."""
        return self.groups_per_batch * self.group_size

    @property
    def group_size(self) -> int:
        return self.plan.layout.group_size

    @property
    def makespan_s(self) -> float:
        """Mean step seconds; only valid if `is_exact`."""
        return self.lower_bound_s

    @property
    def busy_s(self) -> dict[str, float]:
        """Predicted seconds per mean step in which each submesh computes."""
        predicted = self.plan.predicted
        return {m: b * predicted.makespan_s for m, b in predicted.busy_fraction.items()}

    @property
    def peak_bytes(self) -> float:
        """Predicted maximum bytes per device."""
        return max(self.plan.predicted.peak_bytes.values())

    @property
    def placement(self) -> Key:
        """Policy and layout name, without group size and options."""
        return self.policy, self.name

    @property
    def granularity(self) -> Key:
        """`placement`, group size and number of groups per batch."""
        return *self.placement, self.group_size, self.groups_per_batch

    @cached_property
    def key(self) -> Key:
        savings: Key = ()
        if not self.has_open_options:
            options = options_of(self.plan.layout).values()
            savings = tuple((o.zero, o.shard_devices, REMAT.index(o.remat)) for o in options)
        return *self.granularity, savings

    @property
    def has_open_options(self) -> bool:
        return self.space_index is not None and self.simulator is None

    @property
    def ranked_plan(self) -> Plan:
        """The plan with one bucket that was ranked."""
        return self.one_bucket_plan or self.plan

    def with_plan(self, plan: Plan, **changes: Any) -> Candidate:
        """Return the candidate with another plan and no rounds."""
        return replace(self, plan=plan, round_seconds=(), **changes)

    def expand(self, evaluator: PlanEvaluator) -> list[Candidate]:
        """Count one more batch, choose options or simulate; return the replacing candidates."""
        assert self.space_index is not None, "a baseline is exact"
        space, p, c = self.space_index
        groups, batch = self.groups_by_batch, self.n_counted_batches
        if self.simulator is not None:
            makespan_s = float(np.mean([self.simulator.makespan_s(n) for n in groups]))
            return [replace(self, lower_bound_s=makespan_s, is_exact=True)]
        if batch == len(groups):
            return self._candidates_by_choice(evaluator.context, space, p, c)
        # The number of groups does not depend on options. The bound from volumes may exceed it:
        # counting assumes the maximum number of sub-microbatches per group, the bound the mean.
        n_groups = max(groups[batch], evaluator.count_groups(self.plan.layout, batch))
        bounds_s = self.batch_bounds_s
        if n_groups != groups[batch]:
            bounds_s = bounds_s.copy()
            bounds_s[batch] = space.batch_bounds_s(p, c, self.fitting_options, [n_groups])[0]
        groups = (*groups[:batch], n_groups, *groups[batch + 1 :])
        return [self._with_bounds(bounds_s, groups_by_batch=groups, n_counted_batches=batch + 1)]

    def _with_bounds(self, batch_bounds_s: Array, **changes: Any) -> Candidate:
        """Return the candidate with other bounds of the batches' makespans."""
        lower_bound_s = float(batch_bounds_s.mean(axis=0).min())
        return replace(self, batch_bounds_s=batch_bounds_s, lower_bound_s=lower_bound_s, **changes)

    def _candidates_by_choice(
        self, context: SearchContext, space: Space, p: int, c: int
    ) -> list[Candidate]:
        """Return a candidate for each choice of options."""
        contents, n_subs = space.contents_at(p, c), space.sub_microbatches_at(c)
        choices = list(range(len(self.fitting_options)))
        if space.whole_buckets:  # simulation is expensive, and the choices differ little
            choices = [int(self.batch_bounds_s.mean(axis=0).argmin())]
        candidates = []
        for i in choices:
            options = {m: space.tables[m].options[o] for m, o in self.fitting_options[i].items()}
            plan = with_options(self.plan, options)
            simulator = OneBucketSimulator(plan, contents, context, n_subs)
            bounds_s = self.batch_bounds_s[:, [i]]
            candidates.append(self._with_bounds(bounds_s, plan=plan, simulator=simulator))
        return candidates

    def largest_buckets(self) -> list[Bucket | None]:
        """Return the largest buckets that fit with the ranked and with any options; None: any."""
        if self.space_index is None or not self.space_index[0].context.spec.memory_bytes:
            return [None]
        space, p, c = self.space_index
        segments = self.ranked_plan.layout.segments
        options = {s.module: MemoryOption.from_segment(s) for s in segments}
        return list(dict.fromkeys(space.largest_bucket(p, c, o) for o in (options, None)))

    def mean_round_s(self, n: int) -> float:
        """Return the mean of the first `n` rounds, with a penalty for a second remat policy."""
        mean_s = float(np.mean(self.round_seconds[:n]))
        return mean_s * (1 + MIN_SECOND_REMAT_GAIN) if self.plan.scheduling.residuals else mean_s

    def with_predictions(self, evaluator: PlanEvaluator) -> Candidate:
        """Return the candidate with predictions from one-bucket steps and its peak bytes."""
        plan, busy = self.plan, dict(self.plan.predicted.busy_fraction)
        if self.simulator is not None:
            counts = [n for x in self.groups_by_batch for n in (math.floor(x), math.ceil(x))]
            traces = {n: self.simulator.trace(n) for n in set(counts)}
            total_s = sum(traces[n].makespan_s for n in counts)
            each = [(traces[n].makespan_s, traces[n].busy_fraction()) for n in counts]
            names = [m.name for m in plan.layout.submeshes]
            busy = {m: sum(s * b.get(m, 0.0) for s, b in each) / total_s for m in names}
        peaks = evaluator.peak_bytes_limit(plan)
        predicted = Predicted(self.lower_bound_s, busy, peaks, self.lower_bound_s)
        return replace(self, plan=replace(plan, predicted=predicted))
