"""Measures what planning starts from: the data's loads and the model's times, on all processes."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import jax
import msgspec

from dflop_jax.cluster.host_memory import free_bytes
from dflop_jax.cluster.messages import ProcessGroup
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
from dflop_jax.data.sample import NamesTail
from dflop_jax.pipeline.layout import can_join
from dflop_jax.plan.limits import held_bytes, parallel_limits
from dflop_jax.profile.links import LinkTiming, hardware_of, node_size, slowest, time_links
from dflop_jax.profile.measure import model_profile, profile_key, together
from dflop_jax.profile.optimizer_state import with_optimizer
from dflop_jax.profile.parts import param_dims, probe_bytes
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.profile.shapes import shapes_to_time, shapes_within
from dflop_jax.profile.state import float32_bytes
from dflop_jax.profile.timing_jobs import time_layers, timing_jobs
from dflop_jax.record_files import load, save
from dflop_jax.records import DataProfile, Hardware, LayerTiming, ModelProfile, Profile, Shape
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
    most_demanding = source.tail() if isinstance(source, NamesTail) else []
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
    held = held_bytes(parameters, halved)
    model, stage = parallel_limits(held, place.plannable_bytes, place.node)
    return replace(config, max_model=config.max_model or model, max_stage=config.max_stage or stage)


def parameter_bytes(module: Module) -> dict[str, float]:
    """Bytes of a module's parameters in float32, of each part."""
    return {
        part: float32_bytes(param_dims(module, (part,)))
        * (n_rows(module, part) if part in stacked_parts(module) else 1)
        for part in module.freeze_groups
    }


def _local(place: Workplace) -> list[jax.Device]:
    return [d for d in place.devices if d.process_index == place.peers.process]


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
    return with_optimizer(profile, model, tx, place.trained.frozen)


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
    free = place.peers.broadcast("profile/free", msgspec.json.encode(free_bytes()))
    free_of_host = msgspec.json.decode(free, type=int | None)
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
    shared = peers.broadcast("profile/degrees", msgspec.json.encode(degrees))
    degrees = msgspec.json.decode(shared, type=list[int])
    devices = _local(place)

    @cache
    def key() -> str:
        n = len(place.devices)
        return profile_key(model, devices, shapes, place.config.model, degrees, n, peers.count)

    def measure() -> ModelProfile | None:
        apart = _compute_apart(devices, peers)
        blocks = [_blocks(place, degree, apart=apart) for degree in degrees]
        sync = partial(peers.barrier, "profile/alone")
        timings = time_layers(model, timing_jobs(model, shapes, blocks), on_progress, sync)
        parts = peers.gather("profile/timings", msgspec.json.encode(timings))
        concurrency = _concurrency(model, shapes[list(model.modules)[-1]][-1], place, devices)
        if not peers.is_hub:
            return None
        timings = [t for p in parts for t in msgspec.json.decode(p, type=list[LayerTiming])]
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
    peers, folder, known, file = place.peers, Path(place.config.cache_dir), b"", Path()
    if peers.is_hub:
        file = folder / f"{name}-{key()}.json"
        with suppress(ValueError):  # none yet, or one of another version
            known = msgspec.json.encode(load(kind, file))
        if not known and not os.access(folder, os.W_OK):
            raise ValueError(
                f"cache_dir={folder}: cannot be written, and what is measured would be lost; "
                "choose another --cache_dir"
            )
    known = peers.broadcast(f"{name}/cached", known)
    if not known:
        measured = measure()
        if peers.is_hub:
            save(measured, file)
            known = msgspec.json.encode(measured)
        known = peers.broadcast(name, known)
    return msgspec.json.decode(known, type=kind)


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
        return hardware_of(kind, node, timings) if place.peers.is_hub else None

    return _measured_once(place, "links", key, Hardware, measure)


def timed_links(place: Workplace, node: int) -> list[LinkTiming]:
    """Timings of all processes, on process 0; all call this together."""
    peers = place.peers
    mine = time_links(place.devices, node, partial(peers.barrier, "links/sync"))
    parts = peers.gather("links/timed", msgspec.json.encode(mine))
    return slowest([msgspec.json.decode(part, type=list[LinkTiming]) for part in parts])


def _compute_apart(devices: Sequence[jax.Device], peers: ProcessGroup) -> bool:
    """Whether no two processes compute with the same cores: accelerators, hosts of their own or
    pinned processes."""
    if not devices or devices[0].platform != "cpu":
        own_cores: list[str] = []
    elif hasattr(os, "sched_getaffinity"):
        own_cores = [f"{socket.gethostname()}/{core}" for core in os.sched_getaffinity(0)]
    else:
        own_cores = [socket.gethostname()]
    gathered = peers.gather("profile/cores", msgspec.json.encode(own_cores))
    cores = [core for part in gathered for core in msgspec.json.decode(part, type=list[str])]
    return peers.broadcast("profile/apart", b"1" * (len(cores) == len(set(cores)))) == b"1"


def _concurrency(
    model: MultimodalModel, shape: Shape, place: Workplace, local: Sequence[jax.Device]
) -> float:
    """How many devices really compute at once: the rate of all against that of one alone."""
    every, peers = place.devices, place.peers
    if len(every) == 1 or every[0].platform != "cpu":
        return float(len(every))
    alone = together(model, shape, local[:1]) if peers.is_hub else 0.0
    peers.barrier("profile/together")
    mine = together(model, shape, local) if local else 0.0
    alone, rate = peers.sums("profile/rates", [alone, mine])
    return min(float(len(every)), max(1.0, rate / alone))


def make_profile(
    place: Workplace, source: Source, on_progress: OnProgress | None = None
) -> Profile:
    """Return the data profile of a source and the model profile on the devices at hand."""
    data = profile_data(place, source)
    return Profile(profile_model(place, data, on_progress), data)
