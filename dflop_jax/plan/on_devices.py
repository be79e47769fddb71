"""The choice among the finalists on the devices themselves: by the times of their own programs, and
of those that memory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.race import race
from dflop_jax.records import Plan, Prices

TimePlan = Callable[[Plan], Prices]
TryStep = Callable[[Plan, Prices], None]
# Of the memory that plans fill: what a message says to plan without where no shortage is known.
_GUESSED_SHORTAGE = 0.1


class PlanTooLarge(ValueError):
    """A plan whose programs ran out of memory; `short_bytes` are missing, 0: not known. `what`: the
    message without its remedy."""

    def __init__(self, what: str, short_bytes: float = 0.0):
        super().__init__(
            f"{what}; give a smaller --plan.memory_bytes, --plan.zero 3, --train.remat layers or a "
            "smaller --data.max_tokens"
        )
        self.what, self.short_bytes = what, short_bytes


def by_its_own(
    evaluator: Evaluator,
    plans: Sequence[Plan],
    n: int,
    time_plan: TimePlan,
    try_step: TryStep,
) -> tuple[Plan, int]:
    """The fastest plan by the times of its own programs, with the figures that these give, and how
    many were timed: of the first about `n` (0: the first, by the profile) that memory holds when
    they are tried, and of the others where it holds none of these.

    Whatever memory does not hold is dropped, and what it was short of is left free by the others.

    Raises:
      ValueError: it holds none.
    """
    devices = _Devices(evaluator, time_plan, try_step)
    first = to_time(plans, n)
    others = [p for p in plans if p not in first]
    judged = [j for p in first for j in devices.timed(p, alone=len(first) == 1)]
    while judged or others:
        if not judged:
            plan = others.pop(0)
            judged = devices.timed(plan, alone=True) if n else devices.by_profile(plan)
            continue
        best, *slower = race(evaluator, judged)
        if taken := devices.after_a_step(best):
            return taken, devices.n_timed
        judged = [j for j in slower if devices.hold(j.plan)]
    raise ValueError(devices.why_none())


def to_time(plans: Sequence[Plan], n: int) -> list[Plan]:
    """The first `n` plans, and `n` of the first one's policy: a policy that is far from the fastest
    takes no place of it."""
    alike = [p for p in plans if p.policy == plans[0].policy][:n]
    return [p for i, p in enumerate(plans) if i < n or p in alike]


class _Devices:
    """Tries plans on the devices at hand, and learns from those that these do not hold."""

    def __init__(self, evaluator: Evaluator, time_plan: TimePlan, try_step: TryStep):
        self._evaluator, self._time_plan, self._try_step = evaluator, time_plan, try_step
        self._short_bytes = 0.0
        self._refused: list[PlanTooLarge] = []
        self.n_timed = 0

    def hold(self, plan: Plan) -> bool:
        """Whether a plan leaves free what others were short of."""
        return not self._short_bytes or self._evaluator.fits(plan)

    def by_profile(self, plan: Plan) -> list[Candidate]:
        """The plan as the profile has it; nothing where the devices do not hold it."""
        return [Candidate(self._figured(plan))] if self.hold(plan) else []

    def timed(self, plan: Plan, *, alone: bool) -> list[Candidate]:
        """The plan, judged by its own times; nothing where the devices do not hold it. `alone`: the
        profile chose it."""
        if not self.hold(plan):
            return []
        plan = self._figured(plan)
        by_profile_s = plan.predicted.makespan_s
        try:
            prices = self._time_plan(plan)
        except PlanTooLarge as e:
            self._drop(e)
            return []
        self.n_timed += 1
        free = plan if plan.scheduling.kept else plan.with_scheduling(lookahead=0)
        timed = self._evaluator.evaluate(free, by_profile_s, prices)
        if alone:
            timed = replace(timed, predicted=replace(timed.predicted, chosen_by_s=by_profile_s))
        return [Candidate(timed, prices=prices)]

    def _figured(self, plan: Plan) -> Plan:
        """With the figures that the profile gives."""
        return self._evaluator.evaluate(plan, plan.predicted.makespan_s)

    def after_a_step(self, judged: Candidate) -> Plan | None:
        """The plan once it has run a step; None where the devices do not hold that."""
        left = {
            m: max(0.0, n - self._short_bytes) for m, n in judged.plan.scheduling.free_bytes.items()
        }
        plan = judged.plan.with_scheduling(free_bytes=left)  # that groups may keep more in
        try:
            self._try_step(plan, judged.prices or self._time_plan(plan))
        except PlanTooLarge as e:
            self._drop(e)
            return None
        return plan

    def why_none(self) -> str:
        """One line: what was tried, and what to plan with."""
        limit = self._evaluator.rules.spec.memory_bytes
        if limit and not self._short_bytes:
            limit *= 1 - _GUESSED_SHORTAGE
        remedy = f"--plan.memory_bytes {limit:.4g}" if limit else "--plan.memory_bytes"
        last = self._refused[-1].what if self._refused else "none was tried"
        return (
            f"no plan of the fastest fits into memory ({len(self._refused)} tried): {last}; plan "
            f"for less: {remedy}, --plan.zero 3, --train.remat layers or a smaller "
            "--data.max_tokens"
        )

    def _drop(self, error: PlanTooLarge) -> None:
        self._refused.append(error)
        self._short_bytes += error.short_bytes
        self._evaluator = self._evaluator.with_less_memory(error.short_bytes)
