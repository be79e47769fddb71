"""The same run on another number of devices: what was measured on some serves all of their kind,
and plans that were made for other numbers are kept in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.profile.links import node_size
from dflop_jax.record_files import load, save
from dflop_jax.records import Hardware, Plan, PriceList, Profile
from dflop_jax.report.run_folder import PLANS
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.profiling import measured_hardware

PROCESSES, DEVICES = "processes", "devices"  # of `meta.planned_under`: what may be another number


def recounted(profile: Profile, then: int, now: int) -> Profile:
    """A profile that was measured with `then` devices, for `now` of the same: layers take what they
    took, and of `now` devices as large a share computes at once."""
    model = profile.model
    at_once = min(float(now), model.concurrency * now / then)
    return replace(profile, model=replace(model, concurrency=at_once))


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


@dataclass(frozen=True)
class KnownPlan:
    """A plan, what it was made under (`meta.planned_under`), and the prices that it has there."""

    planned_under: dict[str, Any]
    plan: Plan
    prices: PriceList


def keep_plan(run_dir: str | Path, known: KnownPlan) -> None:
    """Keep a plan for when the run has its number of devices, in place of one for that number."""
    file = _file(run_dir, known.planned_under)
    file.parent.mkdir(exist_ok=True)
    save(known, file)


def find_plan(
    run_dir: str | Path, planned_under: Mapping[str, Any], same: Callable[[str, Any, Any], bool]
) -> KnownPlan | None:
    """The plan that is kept for what would be planned under now, as `same` compares it by names;
    None where there is none."""
    try:
        known = load(KnownPlan, _file(run_dir, planned_under))
    except ValueError:  # none, or one of another version
        return None
    then, now = known.planned_under, msgspec.json.decode(msgspec.json.encode(planned_under))
    fits = then.keys() == now.keys() and all(same(name, then[name], now[name]) for name in now)
    return known if fits else None


def _file(run_dir: str | Path, planned_under: Mapping[str, Any]) -> Path:
    return Path(run_dir, PLANS, f"{planned_under[PROCESSES]}-{planned_under[DEVICES]}.json")
