"""Decides whether to change to another plan, from the samples of recent steps.

Every `plan.redecide_every` steps process 0 compares the loads of recent samples with those that the
plan was last searched for. If they differ by more than chance, it searches for another plan and
simulates both, while the other processes wait. The run changes plans if the remaining steps save
more time than the last change cost (`change_plan`). Losses agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.config import Config
from dflop_jax.plan.evaluate import simulate
from dflop_jax.records import DataProfile, Load, Plan, Profile
from dflop_jax.schedule.buckets.choose import dominating_loads
from dflop_jax.schedule.buckets.sizes import oversize_samples
from dflop_jax.train.choose_plan import PlannedRun
from dflop_jax.train.planning import make_plan
from dflop_jax.train.trials import Trial

# Standard errors by which means must differ to count as a change; twice as many would find a change
# of the data after four times as many steps.
_MIN_STANDARD_ERRORS = 3.0
_MIN_SAVING = 0.03  # share of a step that a plan must save; predictions may err by this


@dataclass(frozen=True)
class NewPlan:
    """A plan to change to, and the profile that it was made from."""

    plan: Plan
    profile: Profile
    trials: tuple[Trial, ...] | None = None  # of the run; None: unchanged


def find_drift(profiled: Sequence[Load], recent_loads: Sequence[Load]) -> float:
    """Return the largest relative change of a module's mean tokens or content beyond chance."""
    max_change, loads = 0.0, (*profiled, *recent_loads)
    for module in dict.fromkeys(m for load in loads for m in load.pieces):
        for amounts in _tokens_and_content(loads, module):
            before, now = np.split(amounts, [len(profiled)])
            error = np.sqrt(before.var() / len(before) + now.var() / len(now))
            change = abs(now.mean() - before.mean())
            if change > _MIN_STANDARD_ERRORS * error:
                max_change = max(max_change, float(change / max(now.mean(), before.mean())))
    return max_change


def _tokens_and_content(loads: Sequence[Load], module: str) -> np.ndarray:
    """Return tokens and content features of each sample in a module, [1 + features, loads]."""
    n_features = max((len(c) for load in loads for c in load.content_of(module)), default=1)
    amounts = np.zeros((1 + n_features, len(loads)))
    for i, load in enumerate(loads):
        for tokens, content in zip(load.lengths(module), load.content_of(module), strict=True):
            amounts[:, i] += tokens, *content
    return amounts


def make_recent_profile(
    profiled: DataProfile, recent_loads: Sequence[Load], steps: range
) -> DataProfile:
    """Return the profile of the samples of some steps; the largest known samples stay in it."""
    source = f"{profiled.source.split(', steps ')[0]}, steps {steps.start} to {steps.stop - 1}"
    loads = (*profiled.tail, *profiled.loads)
    modules = dict.fromkeys(m for load in loads for m in load.pieces)
    tail = dominating_loads(loads, [*modules])
    return DataProfile(source, profiled.n_total, tuple(recent_loads), tuple(tail))


def predict_saving(
    plan: Plan, new_plan: Plan, profile: Profile, config: Config
) -> tuple[float | None, str]:
    """Simulate the share of a step that the new plan saves; None and the reason if `plan` stays."""
    data, n = profile.data, config.train.global_batch
    if new_plan.layout == plan.layout:
        return None, "the current plan is still the best"
    loads = (*data.loads, *data.tail)
    if newly_excluded := {*oversize_samples(loads, new_plan)} - {*oversize_samples(loads, plan)}:
        return None, f"the best plan leaves out {len(newly_excluded)} samples that are trained on"
    batches = []
    for i in range(0, len(data.loads), n):
        batch = data.loads[i : i + n]
        too_large = {j for p in (plan, new_plan) for j in oversize_samples(batch, p)}
        batches.append([load for j, load in enumerate(batch) if j not in too_large])
    recent_batches = batches[-config.plan.sampled_batches :]
    now_s, then_s = (
        simulate(p, recent_batches, profile.model).makespan_s for p in (plan, new_plan)
    )
    if then_s >= now_s:
        return None, "the best plan for them is not faster"
    return 1 - then_s / now_s, ""


class Redecider:
    """Searches for a better plan; `loads` returns a step's loads before any are replaced."""

    def __init__(self, run: PlannedRun, loads: Callable[[int], list[Load]]):
        self._run, self._loads = run, loads
        self._profile = run.profile  # the profile that a plan was last searched for

    def propose_plan(self, steps_done: int, step_s: Sequence[float]) -> NewPlan | None:
        """Return the plan to change to, or None; runs on all processes together. `step_s` are the
        seconds of the steps since the last call, on process 0."""
        peers, new = self._run.context.peers, None
        if peers.is_primary:
            new, message = self._search_if_changed(steps_done, step_s)
            self._run.progress.log(f"after step {steps_done}: {message}")
        return peers.broadcast(f"redecide/{steps_done}", new, NewPlan | None)

    def _search_if_changed(
        self, steps_done: int, step_s: Sequence[float]
    ) -> tuple[NewPlan | None, str]:
        """Search if samples have changed; return a plan that saves time or None, and why."""
        context, change_s = self._run.context, self._run.change_s
        config = context.config
        n = -(-config.plan.profile_samples // config.train.global_batch)
        steps = range(max(0, steps_done - min(n, config.plan.redecide_every)), steps_done)
        recent_loads = [load for step in steps for load in self._loads(step)]
        if not (changed := find_drift(self._profile.data.loads, recent_loads)):
            return None, "samples have not changed since planning"
        text = f"samples changed by {changed:.0%}; searching for another plan"
        self._run.progress.log(f"after step {steps_done}: {text}")
        data = make_recent_profile(self._profile.data, recent_loads, steps)
        self._profile = replace(self._profile, data=data)
        try:
            new_plan = make_plan(context, self._profile).plan
        except ValueError as e:
            return None, f"no plan for the recent samples: {e}"
        saving, reason = predict_saving(self._run.ex.plan, new_plan, self._profile, config)
        if saving is None:
            return None, reason
        steps_left = config.train.steps - steps_done
        saved_s = saving * float(np.median(step_s)) * steps_left
        is_worthwhile = saving > _MIN_SAVING and saved_s > change_s
        message = (
            f"another plan would save {saving:.0%} of a step, {saved_s:.1f} s in {steps_left} "
            f"steps, and cost {change_s:.1f} s: "
        ) + ("changing to it" if is_worthwhile else "keeping the current one")
        return (NewPlan(new_plan, self._profile) if is_worthwhile else None), message
