"""What a search compares: a placement with a cut, made exact step by step, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.options import options_of, saving_words
from dflop_jax.plan.uniform import Uniform
from dflop_jax.records import REMAT, Bucket, Plan


@dataclass(frozen=True)
class Candidate:
    """A placement with its best cut into groups of one bucket, simulated.

    saving: how its modules save memory, in words; "none" if they do not. busy_s: seconds that each
    submesh computes in a step of `makespan_s`, on average. peak_bytes: of the device that needs
    most.
    """

    policy: str
    name: str
    microbatches: int
    saving: str
    makespan_s: float
    busy_s: dict[str, float]
    peak_bytes: float


@dataclass(frozen=True)
class Ranked:
    """A placement with a cut, whose mean makespan is at least `bound_s`.

    most: the largest bucket that memory holds with these options; None: any. uniform: simulates its
    groups; None: a baseline, whose batches were scheduled. groups: of each sampled batch, at least.
    bounds_s: of each batch's makespan. steps: taken towards exactness. The first ones simulate each
    batch with the least number of groups, the others with the number that the scheduler makes.
    """

    policy: str
    name: str
    cut: int
    plan: Plan
    bound_s: float
    most: Bucket | None = None
    uniform: Uniform | None = None
    groups: tuple[int, ...] = ()
    bounds_s: tuple[float, ...] = ()
    steps: int = 0

    @property
    def key(self) -> tuple[str, str, int, tuple[tuple[int, int], ...]]:
        options = options_of(self.plan.layout).values()
        simplest = tuple((o.zero, REMAT.index(o.remat)) for o in options)
        return self.policy, self.name, self.cut, simplest

    @property
    def exact(self) -> bool:
        return self.uniform is None or self.steps == 2 * len(self.groups)

    def refined(self, evaluator: Evaluator) -> Ranked:
        """The same a step nearer to exact."""
        assert self.uniform is not None, "a baseline is exact"
        groups, bounds_s = list(self.groups), list(self.bounds_s)
        counts, batch = divmod(self.steps, len(groups))
        if counts:
            groups[batch] = max(groups[batch], evaluator.n_groups(self.plan, batch))
        bounds_s[batch] = self.uniform.makespan_s(groups[batch])
        return replace(
            self,
            groups=tuple(groups),
            bounds_s=tuple(bounds_s),
            bound_s=float(np.mean(bounds_s)),
            steps=self.steps + 1,
        )

    def candidate(self, evaluator: Evaluator) -> Candidate:
        plan, uniform = self.plan, self.uniform
        if uniform is None:
            figures = plan.predicted
            busy_s = {m: b * figures.makespan_s for m, b in figures.busy_fraction.items()}
        else:
            traces = {n: uniform.trace(n) for n in set(self.groups)}
            batches = [traces[n] for n in self.groups]
            seconds = [{m: b * t.makespan_s for m, b in t.busy_fraction().items()} for t in batches]
            busy_s = {
                m.name: float(np.mean([s.get(m.name, 0.0) for s in seconds]))
                for m in plan.layout.submeshes
            }
        return Candidate(
            policy=self.policy,
            name=self.name,
            microbatches=self.cut * plan.layout.group_size,
            saving=saving_words(plan.layout),
            makespan_s=self.bound_s,
            busy_s=busy_s,
            peak_bytes=evaluator.most_bytes(plan),
        )
