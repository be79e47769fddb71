"""What a search compares: a plan, from the lower bound of its makespan to its timed programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dflop_jax.plan.bounds import Space
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.options import Option, options_of, saving_words, with_options
from dflop_jax.plan.placement import name_of
from dflop_jax.plan.uniform import Uniform, around
from dflop_jax.profile.state import Array
from dflop_jax.records import REMAT, Bucket, Plan, Predicted, Prices
from dflop_jax.schedule import BucketChoice

# What decides between candidates that are equally fast: the least is the better.
Key = tuple[object, ...]
# Share of a step that second recompute policies must save, since they double the programs to be
# compiled; twice as much leaves some of them out.
WORTH_PROGRAMS = 0.01


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
      trials_s: seconds in the first trials, which are the same for all.
      prices: of its own programs, once they are timed.
    """

    plan: Plan
    cut: int = 0
    bound_s: float = 0.0
    place: tuple[Space, int, int] | None = field(default=None, compare=False, repr=False)
    options: Sequence[Mapping[str, int]] = field(default=(), compare=False, repr=False)
    by_batch_s: Array = field(default=None, compare=False, repr=False)
    groups: tuple[float, ...] = ()
    n_counted: int = 0
    uniform: Uniform | None = field(default=None, compare=False, repr=False)
    is_exact: bool = True
    ranked_plan: Plan | None = None
    max_microbatches: int = 0
    choice: BucketChoice | None = None
    trials_s: tuple[float, ...] = ()
    prices: Prices | None = None

    @staticmethod
    def of(space: Space, p: int, c: int) -> Candidate:
        """Layout `p` of a space at cut `c` with open options."""
        groups, options = tuple(space.groups[:, p, c].tolist()), space.fitting(p, c)
        return Candidate(
            space.plan(p, c),
            int(space.cuts[c]),
            place=(space, p, c),
            options=options,
            groups=groups,
            is_exact=False,
        )._bounded(space.batches_s(p, c, options, groups))

    @property
    def policy(self) -> str:
        return self.plan.policy

    @cached_property
    def name(self) -> str:
        """Where its modules lie, in short."""
        return name_of(self.plan.layout)

    @property
    def saving(self) -> str:
        """How its modules save memory, in words; "none" if they do not."""
        return saving_words(self.plan.layout)

    @property
    def microbatches(self) -> int:
        """Microbatches into which its one bucket cuts a mean batch."""
        return self.cut * self.group_size

    @property
    def group_size(self) -> int:
        """Microbatches of a group."""
        return self.plan.layout.group_size

    @property
    def makespan_s(self) -> float:
        """Seconds of a mean step, where the candidate is exact."""
        return self.bound_s

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each submesh computes in a mean step, where figures are predicted."""
        figures = self.plan.predicted
        return {m: b * figures.makespan_s for m, b in figures.busy_fraction.items()}

    @property
    def peak_bytes(self) -> float:
        """Bytes of the device that needs most, where figures are predicted."""
        return max(self.plan.predicted.peak_bytes.values())

    @cached_property
    def key(self) -> Key:
        simplest: Key = ()
        if not self.is_open:
            options = options_of(self.plan.layout).values()
            simplest = tuple((o.zero, o.shard_devices, REMAT.index(o.remat)) for o in options)
        return self.policy, self.name, self.group_size, self.cut, simplest

    @property
    def is_open(self) -> bool:
        """Whether its options are not chosen yet."""
        return self.place is not None and self.uniform is None

    def nearer(self, evaluator: Evaluator) -> list[Candidate]:
        """The same with one more batch counted, with each choice of options once all are, or
        simulated once options are chosen."""
        assert self.place is not None, "a baseline is exact"
        if self.uniform is not None:
            makespan_s = float(np.mean([self.uniform.makespan_s(n) for n in self.groups]))
            return [replace(self, bound_s=makespan_s, is_exact=True)]
        by_batch_s, groups = self.by_batch_s.copy(), list(self.groups)
        batch = self.n_counted
        if batch == len(groups):
            return self._with_options(evaluator)
        space, p, c = self.place
        # The same with any options, and as volumes say where that is more: counting divides a group
        # into as many parts as may go together, on average these are fewer.
        groups[batch] = max(groups[batch], evaluator.n_groups(self.plan.layout, batch))
        if groups[batch] != self.groups[batch]:
            by_batch_s[batch] = space.batches_s(p, c, self.options, groups[batch : batch + 1])[0]
        return [self._bounded(by_batch_s, groups=tuple(groups), n_counted=batch + 1)]

    def _bounded(self, by_batch_s: Array, **changes: Any) -> Candidate:
        """The same with other bounds of the batches' makespans."""
        bound_s = float(by_batch_s.mean(axis=0).min())
        return replace(self, by_batch_s=by_batch_s, bound_s=bound_s, **changes)

    def _with_options(self, evaluator: Evaluator) -> list[Candidate]:
        """A candidate for each choice of options."""
        assert self.place is not None, "a baseline has its options"
        space, p, c = self.place
        content, parts = space.content(p, c), space.parts_at(c)
        chosen = list(range(len(self.options)))
        if space.whole:  # simulating is expensive, and the others differ by little
            chosen = [int(self.by_batch_s.mean(axis=0).argmin())]
        candidates = []
        for i in chosen:
            options = {m: space.tables[m].options[o] for m, o in self.options[i].items()}
            plan = with_options(self.plan, options)
            trainable = evaluator.rules.trainable(plan.layout)
            uniform = Uniform(plan, content, evaluator.prices, trainable, parts)
            candidates.append(self._bounded(self.by_batch_s[:, [i]], plan=plan, uniform=uniform))
        return candidates

    @property
    def ranked(self) -> Plan:
        """The plan with the one bucket that it was ranked by."""
        return self.ranked_plan or self.plan

    def largest_buckets(self) -> list[Bucket | None]:
        """The largest bucket that memory holds with the ranked options, and with any; None: any."""
        if self.place is None or not self.place[0].rules.spec.memory_bytes:
            return [None]
        space, p, c = self.place
        options = {s.module: Option.held_by(s) for s in self.ranked.layout.segments}
        return list(dict.fromkeys(space.largest(p, c, these) for these in (options, None)))

    def trial_s(self, n: int) -> float:
        """Mean seconds of the first `n` trials, by which candidates are compared."""
        mean_s = float(np.mean(self.trials_s[:n]))
        return mean_s * (1 + WORTH_PROGRAMS) if self.plan.scheduling.kept else mean_s

    def with_figures(self, evaluator: Evaluator) -> Candidate:
        """The same, its plan with the figures of its uniform steps, in which memory holds as many
        groups as it ever may."""
        plan, busy = self.plan, dict(self.plan.predicted.busy_fraction)
        if self.uniform is not None:
            whole = [n for groups in self.groups for n in around(groups)]
            traces = {n: self.uniform.trace(n) for n in set(whole)}
            took_s = sum(traces[n].makespan_s for n in whole)
            each = [(traces[n].makespan_s, traces[n].busy_fraction()) for n in whole]
            names = [m.name for m in plan.layout.submeshes]
            busy = {m: sum(s * b.get(m, 0.0) for s, b in each) / took_s for m in names}
        figures = Predicted(self.bound_s, busy, evaluator.most_by_submesh(plan), self.bound_s)
        return replace(self, plan=replace(plan, predicted=figures))
