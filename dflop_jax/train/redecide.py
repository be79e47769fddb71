"""Whether another plan would now pay, by the samples that were trained on since the last look.

A plan is made for the data that the profile saw. Every `plan.redecide_every` steps process 0
compares the samples of late with these. Where they differ by more than chance it plans for them and
simulates both plans on the same batches. The run changes plans where the steps that are left save
more than the change costs: it saves, and goes on as a resumed run does under another plan, so that
losses agree to rounding. What it changes to is in the next checkpoint; a run that is killed before
that resumes under the plan that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from dflop_jax.plan.predict import simulate
from dflop_jax.records import DataProfile, Load, Plan, Predicted, Profile
from dflop_jax.report.progress import Progress
from dflop_jax.schedule.shapes.spare import beyond
from dflop_jax.train.planning import make_plan
from dflop_jax.train.prepare import Workplace

_SURE = 3.0  # standard errors by which means differ that differ by more than chance
_LEAST_GAIN = 0.03  # of a step: less is within what predictions are off


@dataclass(frozen=True)
class NewPlan:
    """A plan that pays, and the profile that it was made from."""

    plan: Plan
    profile: Profile


def drift(profiled: Sequence[Load], seen: Sequence[Load]) -> float:
    """The largest change of a module's mean tokens (or of its mean square, of which attention takes
    its time) over the larger of both; 0 where all are within chance."""
    largest = 0.0
    for m in _modules(profiled, seen):
        for power in (1, 2):
            then, now = (
                np.array([sum(n**power for n in load.lengths(m)) for load in loads], float)
                for loads in (profiled, seen)
            )
            error = float(np.sqrt(then.var() / len(then) + now.var() / len(now)))
            change = abs(float(now.mean() - then.mean()))
            if change > _SURE * error:
                largest = max(largest, change / max(now.mean(), then.mean()))
    return largest


def observed(known: DataProfile, seen: Sequence[Load], steps: range) -> DataProfile:
    """The profile of the samples of some steps; the largest that were known keep their room."""
    source = f"{known.source.split(', steps ')[0]}, steps {steps.start} to {steps.stop - 1}"
    tail = largest((*known.tail, *known.loads))
    return DataProfile(source, known.n_total, tuple(seen), tuple(tail))


def largest(loads: Sequence[Load]) -> list[Load]:
    """Those than which no other has as many tokens of every module, each once."""
    modules = _modules(loads)
    asks = {tuple(load.tokens(m) for m in modules): load for load in loads}
    front: list[tuple[int, ...]] = []
    for ask in sorted(asks, reverse=True):  # none before it is smaller in all
        if not any(all(a >= b for a, b in zip(other, ask, strict=True)) for other in front):
            front.append(ask)
    return [asks[ask] for ask in front]


def _modules(*loads: Sequence[Load]) -> list[str]:
    """Modules that some load has pieces of, in the order in which they first occur."""
    return list(dict.fromkeys(m for some in loads for load in some for m in load.pieces))


class Redecider:
    """Looks whether another plan would pay; all processes look together, process 0 decides.

    Args:
      loads: of the batch of a step, without a decoded sample.
      start_s: what starting under a plan takes: programs compiled and timed, parameters placed.
    """

    def __init__(
        self,
        place: Workplace,
        profile: Profile,
        plan: Plan,
        loads: Callable[[int], list[Load]],
        start_s: float,
        progress: Progress,
    ):
        self._place, self._profile, self._plan = place, profile, plan
        self._loads, self._start_s, self._progress = loads, start_s, progress

    def look(self, done: int, step_s: Sequence[float]) -> NewPlan | None:
        """Return what to change to after `done` steps, None to go on.

        Args:
          step_s: measured seconds of the steps since the last look, on process 0.
        """
        peers = self._place.peers
        found = self._decide(done, step_s) if peers.is_hub else None
        shared = peers.share(f"redecide/{done}", msgspec.json.encode(found))
        return msgspec.json.decode(shared, type=NewPlan | None)

    def _decide(self, done: int, step_s: Sequence[float]) -> NewPlan | None:
        config, began_s = self._place.config, time.perf_counter()
        n = -(-config.plan.profile_samples // config.train.global_batch)
        steps = range(max(0, done - min(n, config.plan.redecide_every)), done)
        batches = [self._loads(step) for step in steps]
        seen = [load for batch in batches for load in batch]
        changed = drift(self._profile.data.loads, seen)
        if not changed:
            self._say(done, "samples are as profiled")
            return None
        data = observed(self._profile.data, seen, steps)
        profile = replace(self._profile, data=data)
        try:
            plan = make_plan(self._place, profile).plan
        except ValueError as e:
            self._say(done, f"no plan for the samples of late: {e}")
            return None
        if _programs(plan) == _programs(self._plan):
            self._say(done, f"samples changed by {changed:.0%}; the plan is still the best")
            return None
        known = (*seen, *data.tail)
        if lost := {*beyond(known, plan)} - {*beyond(known, self._plan)}:
            self._say(done, f"the best plan leaves out {len(lost)} samples that are trained on")
            return None
        last = batches[-config.plan.sampled_batches :]
        now_s, then_s = self._simulated(self._plan, plan, last)
        share = 1 - then_s / now_s
        left = config.train.steps - done
        saved_s = share * float(np.median(step_s)) * left
        cost_s = self._start_s + time.perf_counter() - began_s
        words = (
            f"samples changed by {changed:.0%}; another plan would save {share:.0%} of a step, "
            f"{saved_s:.1f} s in {left} steps, and cost {cost_s:.1f} s"
        )
        if share <= 0:
            words = f"samples changed by {changed:.0%}; the best plan for them is not faster"
        pays = share > _LEAST_GAIN and saved_s > cost_s
        self._say(done, f"{words}: {'changing to it' if pays else 'going on'}")
        return NewPlan(plan, profile) if pays else None

    def _simulated(
        self, plan: Plan, other: Plan, batches: Sequence[Sequence[Load]]
    ) -> tuple[float, float]:
        """Seconds of both plans for what both have room for of some batches."""
        held = []
        for batch in batches:
            large = {*beyond(batch, plan), *beyond(batch, other)}
            held.append([load for i, load in enumerate(batch) if i not in large])
        both = [
            simulate(p, held, self._profile.model, hardware=self._place.hardware).makespan_s
            for p in (plan, other)
        ]
        return both[0], both[1]

    def _say(self, done: int, what: str) -> None:
        self._progress.log(f"after step {done}: {what}")


def _programs(plan: Plan) -> Plan:
    """The plan without what may differ while it runs the same programs."""
    return replace(plan, predicted=Predicted(), work_budget=0, lookahead=0, exchange_rooms=())
