"""What a search compares: a plan of one bucket, made exact step by step, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.options import Option, options_of, saving_words
from dflop_jax.plan.placement import name_of
from dflop_jax.plan.uniform import Uniform, around
from dflop_jax.records import REMAT, Bucket, Plan, Predicted

# What decides between candidates that are equally fast: the least is the better.
Key = tuple[object, ...]
Options = Mapping[str, Option]  # of every module


@dataclass(frozen=True)
class Candidate:
    """A plan whose one bucket cuts a mean batch into `cut` groups, and what is known of it.

    bound_s: its mean makespan is at least that. find_largest: the bucket that memory holds with
    these options of modules, None: with any; None where memory is not limited. uniform: simulates
    its groups; None: a baseline, whose batches were scheduled. groups_of: counts those that the
    scheduler makes of a batch. groups: of each batch that it is ranked by. bounds_s: of each
    batch's makespan. steps: taken towards exactness, each of which simulates a batch.
    """

    plan: Plan
    cut: int
    bound_s: float
    find_largest: Callable[[Options | None], Bucket] | None = field(
        default=None, compare=False, repr=False
    )
    uniform: Uniform | None = field(default=None, compare=False, repr=False)
    groups_of: Callable[[int], float] | None = field(default=None, compare=False, repr=False)
    groups: tuple[float, ...] = ()
    bounds_s: tuple[float, ...] = ()
    steps: int = 0

    @property
    def policy(self) -> str:
        return self.plan.policy

    @cached_property
    def name(self) -> str:
        """Where its modules lie, in short."""
        return name_of(self.plan.layout)

    @cached_property
    def largest(self) -> Bucket | None:
        """The largest bucket that memory holds with its options; None: any."""
        if self.find_largest is None:
            return None
        return self.find_largest({s.module: Option.held_by(s) for s in self.plan.layout.segments})

    @cached_property
    def roomiest(self) -> Bucket | None:
        """The largest bucket that memory holds with the options that need least; None: any."""
        return self.find_largest(None) if self.find_largest else None

    @property
    def saving(self) -> str:
        """How its modules save memory, in words; "none" if they do not."""
        return saving_words(self.plan.layout)

    @property
    def microbatches(self) -> int:
        """Microbatches into which a mean batch is cut."""
        return self.cut * self.group_size

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

    @property
    def group_size(self) -> int:
        """Microbatches of a group."""
        return self.plan.layout.group_size

    @cached_property
    def key(self) -> Key:
        options = options_of(self.plan.layout).values()
        simplest = tuple((o.zero, o.shard_devices, REMAT.index(o.remat)) for o in options)
        return self.policy, self.name, self.group_size, self.cut, simplest

    @property
    def exact(self) -> bool:
        return self.uniform is None or self.steps == len(self.groups)

    def nearer(self, _evaluator: Evaluator) -> list[Candidate]:
        """The same with a batch more simulated."""
        assert self.uniform is not None, "a baseline is exact"
        bounds_s = list(self.bounds_s)
        bounds_s[self.steps] = self.uniform.makespan_s(self.groups[self.steps])
        return [
            replace(
                self,
                bounds_s=tuple(bounds_s),
                bound_s=float(np.mean(bounds_s)),
                steps=self.steps + 1,
            )
        ]

    def by_all(self, n_batches: int) -> Candidate:
        """The same, exact by so many batches."""
        assert self.uniform is not None, "a baseline is exact"
        assert self.groups_of is not None, "a baseline is exact"
        groups = tuple(map(self.groups_of, range(n_batches)))
        bounds_s = tuple(map(self.uniform.makespan_s, groups))
        return replace(
            self,
            groups=groups,
            bounds_s=bounds_s,
            bound_s=float(np.mean(bounds_s)),
            steps=len(groups),
        )

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
