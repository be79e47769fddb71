"""Which plan a run goes on with: the one that it was given, its checkpoint's, or a new one. All
processes come to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from dflop_jax.data import Source
from dflop_jax.pipeline.executor import Executor
from dflop_jax.profile.links import node_size
from dflop_jax.records import Hardware, Plan, Prices, Profile, with_remat
from dflop_jax.report.progress import Progress
from dflop_jax.report.spent import PLAN, PROFILE
from dflop_jax.train.meta import Continued, Meta, continued, planned_under
from dflop_jax.train.planning import check_layers, make_plan
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.profiling import make_profile, measured_hardware
from dflop_jax.train.timing import PlanTrials, Timed, make_executor


@dataclass(frozen=True)
class Chosen:
    """The plan of a run, and what is known of it before its first step.

    Attributes:
      executor: the plan's; its programs are compiled where they were `timed` for the choice.
      prices: that batches are scheduled by: those of the checkpoint where the run goes on as it
        was, so that it makes the same schedules.
    """

    executor: Executor
    profile: Profile
    prices: Prices
    timed: Timed | None


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
        if known.says:
            log(known.says)
    mine = known.profile, known.plan, known.recounted
    shared = place.peers.broadcast("given", msgspec.json.encode(mine))
    profile, plan, recounted = msgspec.json.decode(
        shared, type=tuple[Profile | None, Plan | None, bool]
    )
    if profile and recounted and not is_given:
        profile = with_links(place, profile)
    return replace(known, profile=profile, plan=plan, recounted=recounted)


def with_links(place: Workplace, profile: Profile) -> Profile:
    """A profile with the nodes that are here, and with links of a kind that it has not met measured
    (one device knows none between two); all processes call this together."""
    hardware = profile.model.hardware
    if hardware is None:
        return profile
    node = node_size(place.devices, place.hosts or ("",))
    hardware = replace(hardware, devices_per_node=node)
    if not knows_links(hardware, len(place.devices)):
        hardware = measured_hardware(place)
    return replace(profile, model=replace(profile.model, hardware=hardware))


def knows_links(hardware: Hardware, n_devices: int) -> bool:
    """Whether the links that so many devices have were measured."""
    within, across = hardware.devices_per_node > 1, n_devices > hardware.devices_per_node
    measured = {link.across for link in hardware.measured}
    return not ((within and False not in measured) or (across and True not in measured))


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
    """
    profile = known.profile
    if profile is None:
        progress.log("profiling model and data")
        with place.time.part(PROFILE):
            profile = make_profile(place, source)
            shared = place.peers.broadcast("profiled", msgspec.json.encode(profile))
        profile = msgspec.json.decode(shared, type=Profile)
    plan, prices, remat = known.plan, known.prices, place.config.train.remat
    if plan and remat != "auto" and (other := with_remat(plan, remat)) != plan:
        plan, prices = other, None
    with place.time.part(PLAN):
        trials = PlanTrials(place, profile, progress, place.plannable_bytes)
        if place.peers.is_hub:
            if plan is None:
                progress.log("planning")
                found = make_plan(place, profile, time_plan=trials.prices, try_step=trials.rehearse)
                plan = found.plan
                prices = trials.prices(plan)
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
    return Chosen(executor, profile, prices, timed)
