"""Which plan a run goes on with: the one that it was given, its checkpoint's, one that is kept for
these devices, or a new one. All processes come to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.told import is_restart
from dflop_jax.data import Source
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import Plan, Prices, Profile, with_remat
from dflop_jax.report.progress import Progress
from dflop_jax.report.spent import PLAN, PROFILE
from dflop_jax.train.meta import Continued, Meta, continued, planned_under, same_value
from dflop_jax.train.planning import check_layers, make_plan
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.profiling import make_profile
from dflop_jax.train.recount import find_plan, with_links
from dflop_jax.train.timing import PlanTrials, Timed, make_executor


@dataclass(frozen=True)
class Chosen:
    """The plan of a run, and what is known of it before its first step.

    Attributes:
      executor: the plan's; its programs are compiled where they were `timed` for the choice.
      prices: that batches are scheduled by: those of the checkpoint where the run goes on as it
        was, so that it makes the same schedules.
      in_haste: others' devices wait as this run goes on without them: no programs are timed.
    """

    executor: Executor
    profile: Profile
    prices: Prices
    timed: Timed | None
    in_haste: bool


def known_before(
    place: Workplace,
    meta: Meta | None,
    plan: Plan | None,
    profile: Profile | None,
    log: Callable[[str], None],
) -> Continued:
    """What a run goes on with, as process 0 was given it or finds it; only there are prices.

    Args:
      meta: of the checkpoint that is resumed.
      plan, profile: that are given, before any that a checkpoint has.

    Raises:
      ValueError: the checkpoint is of another model.
    """
    known, is_given = Continued(plan, profile), profile is not None
    if meta:
        remedy = "use the same model, or start a new run"
        check_layers(place, meta.profile, "the checkpoint", remedy)
    if meta and place.peers.is_hub:
        known = continued(meta, planned_under(place), plan, profile)
        if known.plan is None:
            known = _with_kept_plan(place, known)
        if known.says:
            log(known.says)
    mine = known.profile, known.plan, known.recounted
    shared = place.peers.share("given", msgspec.json.encode(mine))
    profile, plan, recounted = msgspec.json.decode(
        shared, type=tuple[Profile | None, Plan | None, bool]
    )
    if profile and recounted and not is_given:
        profile = with_links(place, profile)
    return replace(known, profile=profile, plan=plan, recounted=recounted)


def _with_kept_plan(place: Workplace, known: Continued) -> Continued:
    """What to go on with where a plan was made for these devices before, on process 0."""
    kept = find_plan(place.config.run_dir, planned_under(place), same_value)
    if kept is None or known.profile is None:
        return known
    says = known.says.replace(": planning anew", ": the plan for it is there")
    return replace(known, plan=kept.plan, prices=kept.prices.prices, says=says)


def choose(
    place: Workplace,
    source: Source,
    known: Continued,
    given: Executor | None,
    progress: Progress,
) -> Chosen:
    """Measure and search what is not known, all processes together.

    Args:
      given: the executor of a plan that was given; closed where another is taken.

    Raises:
      ValueError: no plan fits.
      TryAgain: none fits those that are left of the processes of a run.
    """
    profile = known.profile
    if profile is None:
        progress.log("profiling model and data")
        with place.time.part(PROFILE):
            profile = make_profile(place, source)
            shared = place.peers.share("profiled", msgspec.json.encode(profile))
        profile = msgspec.json.decode(shared, type=Profile)
    plan, prices, remat = known.plan, known.prices, place.config.train.remat
    if plan and remat != "auto" and (other := with_remat(plan, remat)) != plan:
        plan, prices = other, None
    in_haste = known.recounted and is_restart()
    with place.time.part(PLAN):
        trials = PlanTrials(place, profile, progress, place.plannable_bytes)
        if place.peers.is_hub:
            if plan is None:
                progress.log("planning")
                try:
                    plan = make_plan(place, profile, **_on_devices(place, trials, in_haste)).plan
                except ValueError as e:
                    if not in_haste:
                        raise
                    raise TryAgain(f"{e}; start the others again, and the run goes on") from None
                prices = trials.by_profile(plan) if in_haste else trials.prices(plan)
            elif prices is None:
                prices = trials.prices(plan)
                trials.rehearse(plan, prices)
            trials.choose(plan, prices)
        else:
            plan, prices = trials.follow()
        timed = trials.take(plan)
    if given and (timed or given.plan != plan):
        given.close()
        given = None
    executor = timed.executor if timed else given or make_executor(place, plan)
    return Chosen(executor, profile, prices, timed, in_haste)


def _on_devices(place: Workplace, trials: PlanTrials, in_haste: bool) -> dict[str, Any]:
    """How a search tries plans on the devices, as options of `make_plan`."""
    if not in_haste:
        return {"time_plan": trials.prices, "try_step": trials.rehearse}
    # Each plan that is timed is compiled first.
    by_profile = replace(place.config.plan, node=place.node, finalists=0)
    return {"time_plan": trials.by_profile, "try_step": trials.rehearse, "config": by_profile}
