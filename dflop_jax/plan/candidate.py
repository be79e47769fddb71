"""What a search compares: a plan, from the lower bound of its makespan to its timed programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dflop_jax.plan.bounds import Space
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.one_bucket import OneBucketSimulator, floor_and_ceil
from dflop_jax.plan.options import MemoryOption, describe_savings, options_of, with_options
from dflop_jax.plan.placement import layout_name
from dflop_jax.profile.state import Array
from dflop_jax.records import REMAT, Bucket, Plan, Predicted, Prices
from dflop_jax.schedule import BucketChoice

# What decides between candidates that are equally fast: the least is the better.
Key = tuple[object, ...]
# Share of a step that second recompute policies must save, since they double the programs to be
# compiled; twice as much leaves some of them out.
MIN_SECOND_REMAT_GAIN = 0.01


@dataclass(frozen=True)
class Candidate:
    """A plan and what is known of it, more and more.

    A layout of a space starts with open options and lower bounds by volumes. Its groups are
    counted batch by batch, which raises the bounds: counting is expensive, and of thousands of
    layouts few come near. Each choice of options is then a candidate of its own, which is exact
    once its groups are simulated. The best get other buckets, run trials, and at last have their
    programs timed.

    Attributes:
      plan: with the simplest options while these are open.
      cut: groups into which its one bucket cuts a mean batch.
      bound_s: lower bound of its mean makespan; its makespan where it is exact.
      place: (space, layout, cut); None: a baseline, which is exact from the start.
      options: open ones, by number, that fit.
      by_batch_s: lower bounds of each batch's makespan, [n_batches, n_options].
      groups: of each batch: counted for the first `n_counted`, lower bounds for the others.
      uniform: simulates its groups once options are chosen.
      is_exact: whether its bound is its makespan.
      ranked_plan: with the one bucket that it was ranked by, where `plan` has others.
      max_microbatches: into which the buckets of `plan` cut a mean batch.
      choice: how these buckets were chosen; None: they follow from the one bucket.
      trial_seconds: seconds in the first trials, which are the same for all.
      prices: of its own programs, once they are timed.
    """

    plan: Plan
    groups_per_batch: int = 0
    lower_bound_s: float = 0.0
    space_index: tuple[Space, int, int] | None = field(default=None, compare=False, repr=False)
    fitting_options: Sequence[Mapping[str, int]] = field(default=(), compare=False, repr=False)
    batch_bounds_s: Array = field(default=None, compare=False, repr=False)
    groups_by_batch: tuple[float, ...] = ()
    n_counted_batches: int = 0
    simulator: OneBucketSimulator | None = field(default=None, compare=False, repr=False)
    is_exact: bool = True
    one_bucket_plan: Plan | None = None
    max_microbatches: int = 0
    bucket_choice: BucketChoice | None = None
    trial_seconds: tuple[float, ...] = ()
    prices: Prices | None = None

    @staticmethod
    def from_space(space: Space, p: int, c: int) -> Candidate:
        """Layout `p` of a space at cut `c` with open options."""
        groups, options = (
            tuple(space.min_groups[:, p, c].tolist()),
            space.fitting_options(p, c),
        )
        return Candidate(
            space.plan(p, c),
            int(space.groups_per_batch[c]),
            space_index=(space, p, c),
            fitting_options=options,
            groups_by_batch=groups,
            is_exact=False,
        )._with_bounds(space.batch_bounds_s(p, c, options, groups))

    @property
    def policy(self) -> str:
        return self.plan.policy

    @cached_property
    def name(self) -> str:
        """Where its modules lie, in short."""
        return layout_name(self.plan.layout)

    @property
    def saving(self) -> str:
        """How its modules save memory, in words; "none" if they do not."""
        return describe_savings(self.plan.layout)

    @property
    def microbatches(self) -> int:
        """Microbatches into which its one bucket cuts a mean batch."""
        return self.groups_per_batch * self.group_size

    @property
    def group_size(self) -> int:
        """Microbatches of a group."""
        return self.plan.layout.group_size

    @property
    def makespan_s(self) -> float:
        """Seconds of a mean step, where the candidate is exact."""
        return self.lower_bound_s

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each submesh computes in a mean step, where figures are predicted."""
        predicted = self.plan.predicted
        return {m: b * predicted.makespan_s for m, b in predicted.busy_fraction.items()}

    @property
    def peak_bytes(self) -> float:
        """Bytes of the device that needs most, where figures are predicted."""
        return max(self.plan.predicted.peak_bytes.values())

    @cached_property
    def key(self) -> Key:
        savings: Key = ()
        if not self.has_open_options:
            options = options_of(self.plan.layout).values()
            savings = tuple((o.zero, o.shard_devices, REMAT.index(o.remat)) for o in options)
        return self.policy, self.name, self.group_size, self.groups_per_batch, savings

    @property
    def has_open_options(self) -> bool:
        """Whether its options are not chosen yet."""
        return self.space_index is not None and self.simulator is None

    def expand(self, evaluator: Evaluator) -> list[Candidate]:
        """The same with one more batch counted, with each choice of options once all are, or
        simulated once options are chosen."""
        assert self.space_index is not None, "a baseline is exact"
        if self.simulator is not None:
            makespan_s = float(
                np.mean([self.simulator.makespan_s(n) for n in self.groups_by_batch])
            )
            return [replace(self, lower_bound_s=makespan_s, is_exact=True)]
        batch_bounds_s, groups_by_batch = self.batch_bounds_s.copy(), list(self.groups_by_batch)
        batch = self.n_counted_batches
        if batch == len(groups_by_batch):
            return self._expand_options(evaluator)
        space, p, c = self.space_index
        # The same with any options, and as volumes say where that is more: counting divides a group
        # into as many parts as may go together, on average these are fewer.
        groups_by_batch[batch] = max(
            groups_by_batch[batch], evaluator.count_groups(self.plan.layout, batch)
        )
        if groups_by_batch[batch] != self.groups_by_batch[batch]:
            batch_bounds_s[batch] = space.batch_bounds_s(
                p, c, self.fitting_options, groups_by_batch[batch : batch + 1]
            )[0]
        return [
            self._with_bounds(
                batch_bounds_s, groups_by_batch=tuple(groups_by_batch), n_counted_batches=batch + 1
            )
        ]

    def _with_bounds(self, batch_bounds_s: Array, **changes: Any) -> Candidate:
        """The same with other bounds of the batches' makespans."""
        lower_bound_s = float(batch_bounds_s.mean(axis=0).min())
        return replace(self, batch_bounds_s=batch_bounds_s, lower_bound_s=lower_bound_s, **changes)

    def _expand_options(self, evaluator: Evaluator) -> list[Candidate]:
        """A candidate for each choice of options."""
        assert self.space_index is not None, "a baseline has its options"
        space, p, c = self.space_index
        contents, groups_together = space.contents_at(p, c), space.groups_together_at(c)
        chosen = list(range(len(self.fitting_options)))
        if space.whole_buckets:  # simulating is expensive, and the others differ by little
            chosen = [int(self.batch_bounds_s.mean(axis=0).argmin())]
        candidates = []
        for i in chosen:
            options = {m: space.tables[m].options[o] for m, o in self.fitting_options[i].items()}
            plan = with_options(self.plan, options)
            trainable = evaluator.context.trainable(plan.layout)
            simulator = OneBucketSimulator(
                plan, contents, evaluator.prices, trainable, groups_together
            )
            candidates.append(
                self._with_bounds(self.batch_bounds_s[:, [i]], plan=plan, simulator=simulator)
            )
        return candidates

    @property
    def ranked(self) -> Plan:
        """The plan with the one bucket that it was ranked by."""
        return self.one_bucket_plan or self.plan

    def largest_buckets(self) -> list[Bucket | None]:
        """The largest bucket that memory holds with the ranked options, and with any; None: any."""
        if self.space_index is None or not self.space_index[0].context.spec.memory_bytes:
            return [None]
        space, p, c = self.space_index
        options = {s.module: MemoryOption.from_segment(s) for s in self.ranked.layout.segments}
        return list(dict.fromkeys(space.largest_bucket(p, c, choice) for choice in (options, None)))

    def mean_trial_s(self, n: int) -> float:
        """Mean seconds of the first `n` trials, by which candidates are compared."""
        mean_s = float(np.mean(self.trial_seconds[:n]))
        return mean_s * (1 + MIN_SECOND_REMAT_GAIN) if self.plan.scheduling.residuals else mean_s

    def with_predictions(self, evaluator: Evaluator) -> Candidate:
        """The same, its plan with the figures of its uniform steps, in which memory holds as many
        groups as it ever may."""
        plan, busy = self.plan, dict(self.plan.predicted.busy_fraction)
        if self.simulator is not None:
            group_counts = [n for groups in self.groups_by_batch for n in floor_and_ceil(groups)]
            traces = {n: self.simulator.trace(n) for n in set(group_counts)}
            total_s = sum(traces[n].makespan_s for n in group_counts)
            busy_by_trace = [
                (traces[n].makespan_s, traces[n].busy_fraction()) for n in group_counts
            ]
            names = [m.name for m in plan.layout.submeshes]
            busy = {m: sum(s * b.get(m, 0.0) for s, b in busy_by_trace) / total_s for m in names}
        predicted = Predicted(
            self.lower_bound_s, busy, evaluator.peak_bytes_limit(plan), self.lower_bound_s
        )
        return replace(self, plan=replace(plan, predicted=predicted))
