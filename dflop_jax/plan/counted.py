"""A placement at a cut before its options tell it apart: its groups, counted batch by batch.

Counting is dear, and of thousands of placements few come near. What volumes say of a batch is a
bound of what the scheduler makes of it; each batch that is counted raises the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from dflop_jax.plan.bounds import Bounds
from dflop_jax.plan.candidate import Candidate, Key
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.options import with_options
from dflop_jax.plan.placement import name_of
from dflop_jax.plan.uniform import as_plan
from dflop_jax.profile.state import Array
from dflop_jax.records import Plan


@dataclass(frozen=True)
class Counted:
    """A candidate of a space whose options are open.

    place: of the space, (layout, cut). plan: with the simplest options. options: by number, that
    fit. groups: of each batch, as counted for the first `n_counted` and at least for the others.
    by_batch_s: what no schedule of these undercuts, [n_batches, n_options].
    """

    bounds: Bounds
    place: tuple[int, int]
    plan: Plan
    options: Sequence[Mapping[str, int]]
    groups: tuple[float, ...]
    by_batch_s: Array = field(compare=False, repr=False)
    n_counted: int = 0

    @staticmethod
    def begun(policy: str, bounds: Bounds, p: int, c: int, n_batches: int | None) -> Counted:
        """With what volumes say of the first `n_batches`; None: of all."""
        space = bounds.space
        plan = as_plan(space.layout_at(p, c), policy, (space.bucket(p, c),), space.rules)
        groups = tuple(bounds.groups[:n_batches, p, c].tolist())
        options = bounds.fitting(p, c)
        return Counted(
            bounds,
            (p, c),
            plan.with_layout(fan_in=space.fan_in(c)),
            options,
            groups,
            bounds.batches_s(p, c, options, groups),
        )

    @cached_property
    def bound_s(self) -> float:
        """Its mean makespan is at least that with any options."""
        return float(self.by_batch_s.mean(axis=0).min())

    @cached_property
    def key(self) -> Key:
        return (
            self.plan.policy,
            name_of(self.plan.layout),
            self.plan.layout.group_size,
            self.cut,
            (),
        )

    @property
    def cut(self) -> int:
        return int(self.bounds.space.cuts[self.place[1]])

    def nearer(self, evaluator: Evaluator) -> list[Counted] | list[Candidate]:
        """The same with a batch more counted, or with each choice of options."""
        batch = self.n_counted
        if batch == len(self.groups):
            return self._candidates(evaluator)
        groups, by_batch_s = list(self.groups), self.by_batch_s
        groups[batch] = self._groups_of(evaluator, batch)
        if groups[batch] != self.groups[batch]:
            by_batch_s = by_batch_s.copy()
            one = self.bounds.batches_s(*self.place, self.options, groups[batch : batch + 1])
            by_batch_s[batch] = one[0]
        return [replace(self, groups=tuple(groups), by_batch_s=by_batch_s, n_counted=batch + 1)]

    def _groups_of(self, evaluator: Evaluator, batch: int) -> float:
        """Groups of a batch, the same with any options: as counted, or as volumes say: counting
        divides a group into as many parts as may go together, on average these are fewer."""
        least = float(self.bounds.groups[batch][self.place])
        return max(least, evaluator.n_groups(self.plan.layout, batch))

    def _candidates(self, evaluator: Evaluator) -> list[Candidate]:
        space, content = self.bounds.space, self.bounds.content(*self.place)
        chosen = list(range(len(self.options)))
        if space.divided:  # simulating is dear, and the others differ by little
            chosen = [int(self.by_batch_s.mean(axis=0).argmin())]
        candidates = []
        for i in chosen:
            options = {m: space.tables[m].options[o] for m, o in self.options[i].items()}
            plan = with_options(self.plan, options)
            candidates.append(
                Candidate(
                    plan,
                    self.cut,
                    float(self.by_batch_s[:, i].mean()),
                    partial(self.bounds.largest, *self.place)
                    if space.rules.spec.memory_bytes
                    else None,
                    evaluator.uniform(plan, content, space.parts(self.place[1])),
                    partial(self._groups_of, evaluator),
                    self.groups,
                    tuple(self.by_batch_s[:, i].tolist()),
                )
            )
        return candidates
