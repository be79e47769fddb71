"""Whether another plan would now pay, by the samples that were trained on since the last look.

A plan is made for the data that the profile saw. Every `plan.redecide_every` steps process 0
compares what the data asked for of late with what a plan was last searched for. Where they differ
by more than chance it searches for another plan and simulates both, while the other processes wait.
The run changes plans where the steps that are left save more than the change costs: it saves, and
resumes under the other plan in the same process, so that losses agree to rounding. A run that is
killed before its next checkpoint resumes under the plan that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.config import Config
from dflop_jax.plan.pricing import simulate
from dflop_jax.records import DataProfile, Load, Plan, Profile
from dflop_jax.schedule.buckets.choose import dominating_loads
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples
from dflop_jax.train.choose_plan import ReadyRun
from dflop_jax.train.planning import make_plan

# Standard errors by which means of samples differ that differ by more than chance; twice as many
# find a change of the data in four times as many steps.
_SURE_ERRORS = 3.0
_LEAST_GAIN = 0.03  # share of a step that a plan must save: less is within what predictions are off


@dataclass(frozen=True)
class NewPlan:
    """A plan that pays, and the profile that it was made from."""

    plan: Plan
    profile: Profile


def drift(profiled: Sequence[Load], seen: Sequence[Load]) -> float:
    """The largest change of a module's mean tokens, or of a feature of its content, over the
    larger of both; 0 where all are within chance."""
    most, every = 0.0, (*profiled, *seen)
    for module in dict.fromkeys(m for load in every for m in load.pieces):
        for amount in _amounts(every, module):
            then, now = np.split(amount, [len(profiled)])
            error = float(np.sqrt(then.var() / len(then) + now.var() / len(now)))
            change = abs(float(now.mean() - then.mean()))
            if change > _SURE_ERRORS * error:
                most = max(most, change / max(now.mean(), then.mean()))
    return most


def _amounts(loads: Sequence[Load], module: str) -> np.ndarray:
    """What each sample has of tokens and of each feature of a module's content, [1 + features,
    loads]."""
    n_features = max((len(c) for load in loads for c in load.content_of(module)), default=1)
    amounts = np.zeros((1 + n_features, len(loads)))
    for i, load in enumerate(loads):
        for tokens, content in zip(load.lengths(module), load.content_of(module), strict=True):
            amounts[:, i] += tokens, *content
    return amounts


def observed(known: DataProfile, seen: Sequence[Load], steps: range) -> DataProfile:
    """The profile of the samples of some steps; the largest that were known keep their room."""
    source = f"{known.source.split(', steps ')[0]}, steps {steps.start} to {steps.stop - 1}"
    loads = (*known.tail, *known.loads)
    modules = dict.fromkeys(m for load in loads for m in load.pieces)
    tail = dominating_loads(loads, [*modules])
    return DataProfile(source, known.n_total, tuple(seen), tuple(tail))


def saved_share(
    plan: Plan, best: Plan, profile: Profile, config: Config
) -> tuple[float | None, str]:
    """The share of a step that `best` saves by simulation on the latest batches of a profile, of
    what both plans have room for; None, and why, where the plan in use, `plan`, stays."""
    data, n = profile.data, config.train.global_batch
    if best.layout == plan.layout:
        return None, "the plan is still the best"
    known = (*data.loads, *data.tail)
    if lost := {*oversize_samples(known, best)} - {*oversize_samples(known, plan)}:
        return None, f"the best plan leaves out {len(lost)} samples that are trained on"
    held = []
    for i in range(0, len(data.loads), n):
        batch = data.loads[i : i + n]
        large = {j for p in (plan, best) for j in oversize_samples(batch, p)}
        held.append([load for j, load in enumerate(batch) if j not in large])
    last = held[-config.plan.sampled_batches :]
    now_s, then_s = (simulate(p, last, profile.model).makespan_s for p in (plan, best))
    if then_s >= now_s:
        return None, "the best plan for them is not faster"
    return 1 - then_s / now_s, ""


class Redecider:
    """Looks whether another plan would pay; all processes look together, process 0 decides.

    Args:
      loads: what the data asks for of a step's batch, without a decoded sample: too large ones are
        not replaced.
    """

    def __init__(self, ready: ReadyRun, loads: Callable[[int], list[Load]]):
        self._ready, self._loads = ready, loads
        self._profile = ready.profile  # that a plan was last searched for

    def look(self, done: int, step_s: Sequence[float]) -> NewPlan | None:
        """Return what to change to after `done` steps, None to go on.

        Args:
          step_s: measured seconds of the steps since the last look, on process 0.
        """
        peers, new = self._ready.place.peers, None
        if peers.is_primary:
            new, says = self._decide(done, step_s)
            self._ready.progress.log(f"after step {done}: {says}")
        return peers.broadcast(f"redecide/{done}", new, NewPlan | None)

    def _decide(self, done: int, step_s: Sequence[float]) -> tuple[NewPlan | None, str]:
        """Search where samples are others than those that a plan was last searched for; the plan
        that is found, if the steps that are left save more than the change costs, and why."""
        place, start_s = self._ready.place, self._ready.start_s
        config = place.config
        n = -(-config.plan.profile_samples // config.train.global_batch)
        steps = range(max(0, done - min(n, config.plan.redecide_every)), done)
        seen = [load for step in steps for load in self._loads(step)]
        if not (changed := drift(self._profile.data.loads, seen)):
            return None, "samples are as those that were planned for"
        log = self._ready.progress.log
        log(f"after step {done}: samples changed by {changed:.0%}; searching for another plan")
        data = observed(self._profile.data, seen, steps)
        self._profile = replace(self._profile, data=data)
        try:
            best = make_plan(place, self._profile).plan
        except ValueError as e:
            return None, f"no plan for the samples of late: {e}"
        share, why = saved_share(self._ready.ex.plan, best, self._profile, config)
        if share is None:
            return None, why
        left = config.train.steps - done
        saved_s = share * float(np.median(step_s)) * left
        pays = share > _LEAST_GAIN and saved_s > start_s
        says = (
            f"another plan would save {share:.0%} of a step, {saved_s:.1f} s in {left} steps, and "
            f"cost {start_s:.1f} s: " + ("changing to it" if pays else "going on")
        )
        return (NewPlan(best, self._profile) if pays else None), says
