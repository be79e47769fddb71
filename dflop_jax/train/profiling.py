"""Measures what planning starts from: the data's loads and the model's times, on all processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TypeVar

import jax
import msgspec

from dflop_jax.config import PlanConfig
from dflop_jax.contract import (
    Module,
    MultimodalModel,
    n_rows,
    stacked_parts,
    working_dtype_of,
)
from dflop_jax.data import Source
from dflop_jax.data.content import counter_of
from dflop_jax.distributed.devices import available_host_bytes
from dflop_jax.plan.search_spec import largest_module_bytes, parallel_limits
from dflop_jax.profile.links import (
    LinkTiming,
    hardware_with_links,
    max_over_processes,
    node_size,
    time_links,
)
from dflop_jax.profile.measure import measure_concurrent_rate, model_profile, profile_key
from dflop_jax.profile.optimizer_state import parameter_dims
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.profile.shapes import shapes_to_time, shapes_within
from dflop_jax.profile.timing_jobs import time_layers, timing_jobs
from dflop_jax.profile.traced_parts import param_dims, probe_bytes
from dflop_jax.records import DataProfile, Hardware, LayerTiming, ModelProfile, Profile, Shape
from dflop_jax.records.files import load, save
from dflop_jax.runtime.layout import can_join
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.prepare import Workplace

OnProgress = Callable[[int, int], None]
Measured = TypeVar("Measured", ModelProfile, Hardware)
DEGREES = (1, 2, 4, 8)  # of tensor parallelism, of which every module is profiled


def check_not_empty(source: Source) -> None:
    if not len(source):
        raise ValueError(f"{source.name}: the dataset is empty; name one with records")


def profile_data(place: Workplace, source: Source) -> DataProfile:
    """Loads of up to `profile_samples` samples, evenly spread over the dataset, and of those of all
    of it that ask for most, where the source names them."""
    check_not_empty(source)
    n = min(len(source), place.config.plan.profile_samples)
    picked = [i * len(source) // n for i in range(n)]
    most_demanding: list[int] = getattr(source, "tail", list)()
    counted = counter_of(place.model)
    loads, tail = (
        tuple(counted(source.load(i)) for i in which) for which in (picked, most_demanding)
    )
    return DataProfile(source.name, len(source), loads, tail)


def tensor_degrees(place: Workplace) -> list[int]:
    """Degrees of tensor parallelism to profile: it stays inside a node, and inside a process where
    several CPU devices of each cannot work together."""
    most = min(with_degrees(place).max_model, place.node)
    if place.hardware:
        return [d for d in DEGREES if d <= most]
    return [d for d in DEGREES if d <= most and _blocks(place, d, apart=True)]


def _blocks(place: Workplace, degree: int, *, apart: bool) -> list[tuple[jax.Device, ...]]:
    """Devices that time programs of a tensor-parallel degree at once: of every process if these
    compute `apart`, of every host where a process has too few, else of the first."""
    by_process: dict[int, list[jax.Device]] = {}
    for d in place.devices:
        by_process.setdefault(d.process_index, []).append(d)
    for groups in (list(by_process.values()), place.by_host):
        blocks = [tuple(group[:degree]) for group in groups if len(group) >= degree]
        if blocks := [b for b in blocks if can_join(b)]:
            return blocks if apart else blocks[:1]
    return []


def with_degrees(place: Workplace) -> PlanConfig:
    """`plan.*` with the largest tensor-parallel and pipeline degrees that the model needs where
    none are given."""
    config = place.config.plan
    if config.max_model and config.max_stage:
        return config
    modules = place.model.modules
    parameters = {m: sum(parameter_bytes(module).values()) for m, module in modules.items()}
    halved = [m for m, module in modules.items() if working_dtype_of(module).itemsize == 2]
    held = largest_module_bytes(parameters, halved)
    model, stage = parallel_limits(held, place.plannable_bytes, place.node)
    return replace(config, max_model=config.max_model or model, max_stage=config.max_stage or stage)


def parameter_bytes(module: Module) -> dict[str, float]:
    """Bytes of a module's parameters in float32, of each part."""
    return {
        part: 4.0
        * sum(prod(p.sizes) for p in param_dims(module, part))
        * (n_rows(module, part) if part in stacked_parts(module) else 1)
        for part in module.freeze_groups
    }


def profile_model(
    place: Workplace, data: DataProfile, on_progress: OnProgress | None = None
) -> ModelProfile:
    """Return the model's timings and the links of its devices, both from the cache when programs,
    devices, shapes and versions are the same.

    Processes with devices of their own measure a part each, otherwise process 0 all of it; how many
    devices compute at once is measured by all together.
    """
    model = place.model
    shapes, degrees = probe_shapes(place, data), tensor_degrees(place)
    if place.hardware:
        profile = roofline_profile(
            model, place.hardware, shapes, degrees, n_devices=place.n_devices
        )
    else:
        profile = _timed_profile(place, shapes, degrees, on_progress)
        profile = replace(profile, hardware=measured_hardware(place))
    tx = make_optimizer(place.config.train)
    return replace(profile, **parameter_dims(model, tx, place.trained.frozen))


def probe_shapes(place: Workplace, data: DataProfile) -> dict[str, list[Shape]]:
    """The shapes to time, on CPU devices those whose programs the host's memory holds; all
    processes call this together.

    Raises:
      ValueError: the largest sample alone needs more memory.
    """
    model = place.model
    shapes = shapes_to_time(data, model, place.token_multiple)
    if place.hardware or place.devices[0].platform != "cpu":
        return shapes
    free_of_host = place.peers.broadcast("profile/free", available_host_bytes(), int | None)
    if free_of_host is None:
        return shapes
    a_device = free_of_host / max(map(len, place.by_host))
    return shapes_within(shapes, a_device, lambda m, shape: probe_bytes(model.modules[m], shape))


def _timed_profile(
    place: Workplace,
    shapes: dict[str, list[Shape]],
    degrees: list[int],
    on_progress: OnProgress | None,
) -> ModelProfile:
    model, peers = place.model, place.peers
    # Process 0's: what jax may take of a device, and so what is needed, differs a little.
    degrees = peers.broadcast("profile/degrees", degrees, list[int])
    devices = [d for d in place.devices if d.process_index == peers.process_index]

    @cache
    def key() -> str:
        n = len(place.devices)
        return profile_key(
            model, devices, shapes, place.config.model, degrees, n, peers.n_processes
        )

    def measure() -> ModelProfile | None:
        # Processes of a host share its cores.
        apart = place.devices[0].platform != "cpu" or len({*place.hosts}) == peers.n_processes
        blocks = [_blocks(place, degree, apart=apart) for degree in degrees]
        sync = partial(peers.barrier, "profile/alone")
        timings = time_layers(model, timing_jobs(model, shapes, blocks), on_progress, sync)
        parts = peers.gather("profile/timings", timings, list[LayerTiming])
        concurrency = _concurrency(model, shapes[list(model.modules)[-1]][-1], place, devices)
        if not peers.is_primary:
            return None
        timings = [t for part in parts for t in part]
        profile = model_profile(model, shapes, timings, devices, key=key())
        return replace(profile, concurrency=concurrency)

    return _measured_once(place, "profile", key, ModelProfile, measure)


def _measured_once(
    place: Workplace,
    name: str,
    key: Callable[[], str],
    kind: type[Measured],
    measure: Callable[[], Measured | None],
) -> Measured:
    """What process 0's cache holds under a name and a key (asked of process 0), else what all
    processes `measure` together, which process 0 returns."""
    peers, folder, known, file = place.peers, Path(place.config.cache_dir), None, Path()
    if peers.is_primary:
        file = folder / f"{name}-{key()}.json"
        with suppress(ValueError):  # none yet, or one of another version
            known = load(kind, file)
        if known is None and not os.access(folder, os.W_OK):
            raise ValueError(
                f"cache_dir={folder}: cannot be written, and what is measured would be lost; "
                "choose another --cache_dir"
            )
    known = peers.broadcast(f"{name}/cached", known, kind | None)
    if known is None:
        measured = measure()
        if peers.is_primary:
            save(measured, file)
        known = peers.broadcast(name, measured, kind)
    return known


def measured_hardware(place: Workplace) -> Hardware:
    """The devices' data sheet with nodes and links as they are here, from the cache when devices,
    hosts and versions are the same; all processes call this together."""
    kind, hosts = place.devices[0].device_kind, place.hosts or ("",)
    node = node_size(place.devices, hosts)

    def key() -> str:
        facts = kind, node, [d.process_index for d in place.devices], hosts, jax.__version__
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]

    def measure() -> Hardware | None:
        timings = timed_links(place, node)
        return hardware_with_links(kind, node, timings) if place.peers.is_primary else None

    return _measured_once(place, "links", key, Hardware, measure)


def timed_links(place: Workplace, node: int) -> list[LinkTiming]:
    """Timings of all processes, on process 0; all call this together."""
    peers = place.peers
    mine = time_links(place.devices, node, partial(peers.barrier, "links/sync"))
    return max_over_processes(peers.gather("links/timed", mine, list[LinkTiming]))


def _concurrency(
    model: MultimodalModel, shape: Shape, place: Workplace, local: Sequence[jax.Device]
) -> float:
    """How many devices really compute at once: the rate of all against that of one alone; for
    process 0."""
    every, peers = place.devices, place.peers
    if len(every) == 1 or every[0].platform != "cpu":
        return float(len(every))
    alone = measure_concurrent_rate(model, shape, local[:1]) if peers.is_primary else 0.0
    peers.barrier("profile/together")
    mine = measure_concurrent_rate(model, shape, local) if local else 0.0
    rates = peers.gather("profile/rates", mine, float)
    return min(float(len(every)), max(1.0, sum(rates) / alone)) if peers.is_primary else 0.0


def make_profile(
    place: Workplace, source: Source, on_progress: OnProgress | None = None
) -> Profile:
    """Return the data profile of a source and the model profile on the devices at hand."""
    data = profile_data(place, source)
    return Profile(profile_model(place, data, on_progress), data)
