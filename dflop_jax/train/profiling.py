"""Profiles the data and the model for planning, on all processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import jax

from dflop_jax.config import PlanConfig
from dflop_jax.contract import Module, n_stacked_layers, stacked_parts, working_dtype_of
from dflop_jax.data import Source
from dflop_jax.data.content import content_counter
from dflop_jax.distributed.devices import available_host_bytes
from dflop_jax.hardware import hardware_of_kind
from dflop_jax.plan.search_spec import largest_module_bytes, parallel_limits
from dflop_jax.profile.links import (
    LinkTiming,
    hardware_with_links,
    max_over_processes,
    node_size,
    time_links,
)
from dflop_jax.profile.measure import (
    model_profile,
    order_to_time,
    profile_key,
    shapes_to_time,
    shapes_within,
    time_layers,
    timing_jobs,
)
from dflop_jax.profile.overlap import OverlapTiming, overlap_factors, time_overlaps
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.profile.timed_programs import measure_concurrent_rate, measure_flops_per_s
from dflop_jax.profile.traced_parts import parameter_dims, params_with_axes, timed_program_bytes
from dflop_jax.records import DataProfile, Hardware, LayerTiming, ModelProfile, Profile, Shape
from dflop_jax.records.files import digest, load, save
from dflop_jax.runtime.layout import can_form_submesh
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.run_context import RunContext
from dflop_jax.train.start_budget import EXPECTED_MFU, StartBudget, plan_start
from dflop_jax.train.step_figures import flops_by_module
from dflop_jax.train.trials import max_trials

OnProgress = Callable[[int, int], None]
Measured = TypeVar("Measured", ModelProfile, Hardware)
TENSOR_DEGREES = (1, 2, 4, 8)  # tensor-parallel degrees at which every module is profiled


def check_not_empty(source: Source) -> None:
    if not len(source):
        raise ValueError(f"{source.name}: the dataset is empty; name one with records")


def profile_data(context: RunContext, source: Source) -> DataProfile:
    """Return loads of up to `profile_samples` samples, evenly spread over the dataset, and of the
    largest ones if the source names them."""
    check_not_empty(source)
    n = min(len(source), context.config.plan.profile_samples)
    tail_indices: list[int] = getattr(source, "largest_samples", list)()
    count_load = content_counter(context.model)
    loads = tuple(count_load(source.load(i * len(source) // n)) for i in range(n))
    tail = tuple(count_load(source.load(i)) for i in tail_indices)
    return DataProfile(source.name, len(source), loads, tail)


def tensor_degrees(context: RunContext) -> list[int]:
    """Return the tensor-parallel degrees to profile: within a node, on CPU within a process."""
    max_degree = min(with_default_degrees(context).max_model, context.node)
    return [
        d
        for d in TENSOR_DEGREES
        if d <= max_degree
        and (context.hardware or _select_timing_devices(context, d, on_every_process=True))
    ]


def _select_timing_devices(
    context: RunContext, degree: int, *, on_every_process: bool
) -> list[tuple[jax.Device, ...]]:
    """Return blocks of devices that time programs of a tensor-parallel degree at once: one per
    process, or per host if a process has too few devices, or only the first block."""
    by_process: dict[int, list[jax.Device]] = {}
    for d in context.devices:
        by_process.setdefault(d.process_index, []).append(d)
    for groups in (list(by_process.values()), context.by_host):
        blocks = [tuple(group[:degree]) for group in groups if len(group) >= degree]
        if blocks := [b for b in blocks if can_form_submesh(b)]:
            return blocks if on_every_process else blocks[:1]
    return []


def with_default_degrees(context: RunContext) -> PlanConfig:
    """Return the plan config with default maximum tensor-parallel and pipeline degrees."""
    config = context.config.plan
    if config.max_model and config.max_stage:
        return config
    modules = context.model.modules
    parameters = {m: 4.0 * sum(parameter_counts(module).values()) for m, module in modules.items()}
    half_precision = [m for m, module in modules.items() if working_dtype_of(module).itemsize == 2]
    max_bytes = largest_module_bytes(parameters, half_precision)
    model, stage = parallel_limits(max_bytes, context.plannable_bytes, context.node)
    return replace(config, max_model=config.max_model or model, max_stage=config.max_stage or stage)


def parameter_counts(module: Module) -> dict[str, int]:
    """Return the number of parameters of each part of a module."""
    return {
        part_name: sum(leaf.size for leaf, _ in params_with_axes(module, part_name))
        * (n_stacked_layers(module, part_name) if part_name in stacked_parts(module) else 1)
        for part_name in module.freeze_groups
    }


def profile_model(
    context: RunContext, data: DataProfile, on_progress: OnProgress | None = None
) -> ModelProfile:
    """Return the model's timings and its devices' links, from the cache if it has as many as the
    run's budget allows. Processes that own devices measure a part each, otherwise process 0
    measures all."""
    model = context.model
    shapes, degrees = _probe_shapes(context, data), tensor_degrees(context)
    if context.hardware:
        profile = roofline_profile(
            model, context.hardware, shapes, degrees, n_devices=context.n_devices
        )
    else:
        profile = _time_model(context, data, shapes, degrees, on_progress)
        profile = replace(profile, hardware=measure_hardware(context))
    return with_trained_parameters(context, profile)


def with_trained_parameters(context: RunContext, profile: ModelProfile) -> ModelProfile:
    """Return a profile in which the run's frozen parameters have no gradient and no moments."""
    tx = make_optimizer(context.config.train)
    return replace(profile, **parameter_dims(context.model, tx, context.trained.frozen))


def _probe_shapes(context: RunContext, data: DataProfile) -> dict[str, list[Shape]]:
    """Return the shapes to time; on CPU, those whose programs fit into the host's memory. Runs on
    all processes together. ValueError if the largest sample alone needs more memory."""
    model = context.model
    shapes = shapes_to_time(data, model, context.token_multiple)
    if context.hardware or context.devices[0].platform != "cpu":
        return shapes
    free_host_bytes = context.peers.broadcast("profile/free", available_host_bytes(), int | None)
    if free_host_bytes is None:
        return shapes
    bytes_per_device = free_host_bytes / max(map(len, context.by_host))
    return shapes_within(
        shapes, bytes_per_device, lambda m, shape: timed_program_bytes(model.modules[m], shape)
    )


def start_budget(context: RunContext, profile: Profile) -> StartBudget | None:
    """Return the budget of the run's start by a profile; None if the profile is not measured."""
    measured = profile.model
    if not measured.flops_per_s:
        return None
    return _plan_start(context, profile.data, measured.flops_per_s, measured.shape_s)


def _plan_start(
    context: RunContext, data: DataProfile, flops_per_s: float, shape_s: float
) -> StartBudget:
    train = context.config.train
    shapes = shapes_to_time(data, context.model, context.token_multiple)
    flops = flops_by_module(context, data.loads, {m: s[0].tokens for m, s in shapes.items()})
    run_flops = sum(flops.values()) / len(data.loads) * train.global_batch * train.steps
    return plan_start(
        context.config.plan,
        run_s=run_flops / (EXPECTED_MFU * flops_per_s),
        shape_s=shape_s,
        max_shapes=max(map(len, shapes.values())),
        n_plans=max_trials(context.config, 0),
    )


def _time_model(
    context: RunContext,
    data: DataProfile,
    shapes: dict[str, list[Shape]],
    degrees: list[int],
    on_progress: OnProgress | None,
) -> ModelProfile:
    model, peers, n_devices = context.model, context.peers, len(context.devices)
    # From process 0: jax's memory limit, and so the required degrees, differ a little.
    degrees = peers.broadcast("profile/degrees", degrees, list[int])
    devices = [d for d in context.devices if d.process_index == peers.process_index]
    # In the order in which they are timed.
    shapes = {m: order_to_time(module_shapes, data, m) for m, module_shapes in shapes.items()}

    @cache
    def key() -> str:
        config = context.config.model
        return profile_key(model, devices, shapes, config, degrees, n_devices, peers.n_processes)

    def measure() -> ModelProfile | None:
        is_cpu = context.devices[0].platform == "cpu"
        every = not is_cpu or len({*context.hosts}) == peers.n_processes  # not on shared cores
        blocks = [_select_timing_devices(context, d, on_every_process=every) for d in degrees]
        sync = partial(peers.barrier, "profile/alone")

        def time_shapes(numbers: slice) -> list[LayerTiming]:
            timed = {m: module_shapes[numbers] for m, module_shapes in shapes.items()}
            return time_layers(model, timing_jobs(model, timed, blocks), on_progress, sync)

        rate = measure_flops_per_s(devices, context.config.model.dtype) if devices else 0.0
        start_s = time.perf_counter()
        timings = time_shapes(slice(1))
        figures = rate, time.perf_counter() - start_s
        rates, seconds = zip(*peers.all_gather("profile/start", figures, tuple[float, float]))
        budget = _plan_start(context, data, sum(rates), max(seconds))
        timings += time_shapes(slice(1, budget.n_shapes))
        timings_by_process = peers.gather("profile/timings", timings, list[LayerTiming])
        concurrency = _measure_concurrency(context, shapes[[*model.modules][-1]][0], devices)
        if not peers.is_primary:
            return None
        timings = [t for process_timings in timings_by_process for t in process_timings]
        untimed = {m: module_shapes[budget.n_shapes :] for m, module_shapes in shapes.items()}
        profile = model_profile(model, shapes, timings, devices, key=key(), untimed=untimed)
        return replace(
            profile,
            concurrency=concurrency,
            n_timed=budget.n_shapes,
            shape_s=max(seconds),
            flops_per_s=sum(rates),
        )

    def is_sufficient(stored: ModelProfile) -> bool:
        budget = _plan_start(context, data, stored.flops_per_s, stored.shape_s)
        return stored.n_timed >= budget.n_shapes

    return _measure_cached(context, "profile", key, ModelProfile, measure, is_sufficient)


def _measure_cached(
    context: RunContext,
    name: str,
    key: Callable[[], str],
    record_type: type[Measured],
    measure: Callable[[], Measured | None],
    is_sufficient: Callable[[Measured], bool] = lambda _: True,
) -> Measured:
    """Return the record in process 0's cache, or one that all processes measure together if there
    is none or it is not `is_sufficient`."""
    peers, folder, record, file = context.peers, Path(context.config.cache_dir), None, Path()
    if peers.is_primary:
        file = folder / f"{name}-{key()}.json"
        with suppress(ValueError):  # there is none yet, or one of another version
            record = load(record_type, file)
        if record and not is_sufficient(record):
            record = None
        if record is None and not os.access(folder, os.W_OK):
            raise ValueError(
                f"cache_dir={folder}: cannot be written, so measurements would be lost; "
                "choose another --cache_dir"
            )
    record = peers.broadcast(f"{name}/cached", record, record_type | None)
    if record is None:
        measured = measure()
        if peers.is_primary:
            save(measured, file)
        record = peers.broadcast(name, measured, record_type)
    return record


def measure_hardware(context: RunContext) -> Hardware:
    """Return the devices' data sheet with measured links and overlap factors; runs on all processes
    together. Products on CPUs share their cores with collectives: overlap is not measured there."""
    kind, hosts = context.devices[0].device_kind, context.hosts or ("",)
    node = node_size(context.devices, hosts)

    def key() -> str:
        facts = kind, node, [d.process_index for d in context.devices], hosts, jax.__version__
        return digest(facts)

    def measure() -> Hardware | None:
        peers, devices = context.peers, context.devices
        sync, sheet = partial(peers.barrier, "links/sync"), hardware_of_kind(kind)
        own_timings, own_overlaps = time_links(devices, node, sync), list[OverlapTiming]()
        if devices[0].platform != "cpu":
            own_overlaps = time_overlaps(devices, replace(sheet, devices_per_node=node), sync)
        timings = max_over_processes(peers.gather("links/timed", own_timings, list[LinkTiming]))
        overlaps = peers.gather("links/overlaps", own_overlaps, list[OverlapTiming])
        factors = overlap_factors(max_over_processes(overlaps))
        return hardware_with_links(kind, node, timings, factors) if peers.is_primary else None

    return _measure_cached(context, "links", key, Hardware, measure)


def _measure_concurrency(
    context: RunContext, shape: Shape, local_devices: Sequence[jax.Device]
) -> float:
    """Return the rate of all devices relative to one device's, on process 0."""
    model, devices, peers = context.model, context.devices, context.peers
    if len(devices) == 1 or devices[0].platform != "cpu":
        return float(len(devices))
    single_rate = 0.0
    if peers.is_primary:
        single_rate = measure_concurrent_rate(model, shape, local_devices[:1])
    peers.barrier("profile/together")
    own_rate = measure_concurrent_rate(model, shape, local_devices) if local_devices else 0.0
    rates = peers.gather("profile/rates", own_rate, float)
    if not peers.is_primary:
        return 0.0
    return min(float(len(devices)), max(1.0, sum(rates) / single_rate))


def make_profile(
    context: RunContext, source: Source, on_progress: OnProgress | None = None
) -> Profile:
    """Profile the data of a source and the model on the available devices."""
    data = profile_data(context, source)
    return Profile(profile_model(context, data, on_progress), data)
