"""The same run on another number of devices: what was measured on some serves all of their kind."""

from __future__ import annotations

from dataclasses import replace

from dflop_jax.profile.links import node_size
from dflop_jax.records import Hardware, Profile
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
