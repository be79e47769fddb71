"""Measurement of a ModelProfile: choose shapes from the run's data, time programs on all processes,
and add the costs of recompute policies from the roofline model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh

from dflop_jax.contract import MultimodalModel, chip_of, content_of, layer_kinds_of, on_chip
from dflop_jax.data.media.medium import TEXT_MODULE
from dflop_jax.hardware import GIB, TASK_HOST_S, hardware_of_kind
from dflop_jax.profile import timed_programs
from dflop_jax.profile.links import Call, collective_call
from dflop_jax.profile.roofline import Predictor, build_profile, edge_fields, shapes_to_trace
from dflop_jax.profile.shallow import restrict_to_layer_kind, shallow_segment
from dflop_jax.profile.timed_programs import TimedPrograms, TimingJob, measure_overhead_s
from dflop_jax.profile.traced_parts import divides
from dflop_jax.records import (
    BACKWARD,
    DataProfile,
    LayerTiming,
    MeshShape,
    ModelProfile,
    Recompute,
    Shape,
)
from dflop_jax.records.files import digest
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.out_of_memory import is_out_of_memory

Progress = Callable[[int, int], None]
# Tokens or pieces of the largest timed shape, relative to the largest sample's. Prices are trusted
# only up to a multiple of that shape.
LARGEST_OVER_SAMPLE = 4
# Ratio of the bytes of XLA's CPU programs to those counted in traces. In a nano Qwen3-VL with 1,000
# to 4,000 tokens it was 1.8 in the tower and 2.9 to 3.7 in the LLM (attention masks are square).
_MIN_BYTES_RATIO, _MAX_BYTES_RATIO = 1.7, 4.0

# Fields of timings and of their bytes that are extrapolated to other shapes.
_SECONDS = ("layer_forward_s", "layer_backward_s", "ends_forward_s", "ends_backward_s")
_PROGRAM_BYTES = ("layer_bytes", "temp_bytes")
T = TypeVar("T", LayerTiming, Recompute)

# ---- shapes ----


def shapes_to_time(
    data: DataProfile, model: MultimodalModel, token_multiple: int
) -> dict[str, list[Shape]]:
    """Return per-rank shapes of every module, from a few pieces to several of the largest samples,
    a large one last. Modules that the data does not use get small shapes, so they have prices."""
    return {
        m: _module_shapes(data, m, model.piece_tokens.get(m), token_multiple) for m in model.modules
    }


def _module_shapes(
    data: DataProfile, module: str, piece_tokens: int | None, token_multiple: int
) -> list[Shape]:
    max_pieces = max(len(load.lengths(module)) for load in data.loads)
    if not max_pieces:
        tokens = piece_tokens or token_multiple
        return [Shape(1, tokens), Shape(2, tokens)]
    if piece_tokens:
        largest_rows = LARGEST_OVER_SAMPLE * max_pieces
        counts = max_pieces // 8, max_pieces // 2, max_pieces, largest_rows
        rows = {max(min_rows, n) for min_rows, n in enumerate(counts, 1)}
        return [Shape(n, piece_tokens) for n in sorted(rows)]

    def round_up(tokens: float) -> int:
        return max(token_multiple, -(-int(tokens) // token_multiple) * token_multiple)

    longest_piece = max(n for load in data.loads for n in load.lengths(module))
    largest_sample = max(load.tokens(module) for load in data.loads)
    longest = round_up(longest_piece)
    capacities = sorted({round_up(longest / 4), longest, round_up(longest * 2)})
    largest = Shape(max(2, -(-LARGEST_OVER_SAMPLE * largest_sample // longest)), longest)
    return [*(Shape(1, tokens) for tokens in capacities), Shape(4, capacities[0]), largest]


def shapes_within(
    shapes: dict[str, list[Shape]], memory_bytes: float, bytes_of: Callable[[str, Shape], float]
) -> dict[str, list[Shape]]:
    """Return the shapes whose CPU programs need at most `memory_bytes` (`bytes_of`: bytes counted
    in a trace). The smallest shape and a row of the longest piece are always included; ValueError
    if that row needs more."""
    max_bytes, fitting = memory_bytes / _MAX_BYTES_RATIO, {}
    for module, module_shapes in shapes.items():
        longest = Shape(1, module_shapes[-1].tokens)
        needed_bytes = _MIN_BYTES_RATIO * bytes_of(module, longest)
        if needed_bytes > memory_bytes:
            flag = "--data.max_tokens or " * (module == TEXT_MODULE) + "--data.max_pixels"
            raise ValueError(
                f"the largest sample has {longest.tokens:,} tokens of {module!r} in a row, for "
                f"which training needs about {needed_bytes / GIB:.1f} GiB; each device may use "
                f"{memory_bytes / GIB:.1f} GiB of host memory; lower {flag}"
            )
        required = min(module_shapes), longest
        fitting[module] = [
            s for s in module_shapes if s in required or bytes_of(module, s) <= max_bytes
        ]
    return fitting


def order_to_time(shapes: Sequence[Shape], data: DataProfile, module: str) -> list[Shape]:
    """Return the shapes of a module in the order in which they are timed: first the one nearest in
    size to the largest sample, which every plan has room for and whose programs run long enough to
    be timed well; then the largest, the smallest, and the others, large ones first."""
    largest_sample = max(1, *(load.tokens(module) for load in data.loads))
    by_size = sorted(shapes, key=lambda s: (-s.size, s))
    first = min(by_size, key=lambda s: abs(math.log(s.size / largest_sample)))
    return list(dict.fromkeys([first, by_size[0], by_size[-1], *by_size]))


# ---- programs, over processes ----


def timing_jobs(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[Shape]],
    blocks: Sequence[Sequence[tuple[jax.Device, ...]]],
) -> list[TimingJob]:
    """Return jobs for every module and kind of layers at its `shapes`, at every tensor-parallel
    degree that divides its sizes. `blocks`: for each degree, groups of that many devices, which
    time different jobs at the same time."""
    of_degree = {len(groups[0]): groups for groups in blocks}
    measurements = [
        (m, kind, degree, shape)
        for degree in of_degree
        for m, module in model.modules.items()
        if divides(module, degree)
        for kind in dict.fromkeys(layer_kinds_of(module))
        for shape in shapes[m]
    ]
    return [
        TimingJob(m, shape, of_degree[degree][i % len(of_degree[degree])], kind)
        for i, (m, kind, degree, shape) in enumerate(measurements)
    ]


def time_layers(
    model: MultimodalModel,
    jobs: Sequence[TimingJob],
    on_progress: Progress | None = None,
    sync: Callable[[], None] = lambda: None,
) -> list[LayerTiming]:
    """Run this process's jobs and return their timings; jobs shared by processes run last. Shapes
    that exceed the device's memory are left out, except a module's smallest. All processes call
    this with the same jobs; `sync` waits for all processes."""
    min_shape = {j.module: min(k.shape for k in jobs if k.module == j.module) for j in jobs}
    process = jax.process_index()
    own_jobs = sorted((j for j in jobs if process in j.processes), key=_is_shared)
    is_synced = not any(map(_is_shared, jobs))
    timings: list[LayerTiming] = []
    for i, job in enumerate(own_jobs):
        if _is_shared(job) and not is_synced:
            # gloo connects processes in their first collective, which times out after 30 s.
            is_synced = True
            sync()
            _barrier(job)
        try:
            timing = timed_programs.time_layer(model, job, partial(_barrier, job))
            if process == job.processes[0]:
                timings.append(timing)
        except jax.errors.JaxRuntimeError as e:
            if not is_out_of_memory(e) or job.shape == min_shape[job.module]:
                raise
        if on_progress:
            on_progress(i + 1, len(own_jobs))
    if not is_synced:
        sync()  # the processes with shared jobs wait for all processes
    return timings


def _is_shared(job: TimingJob) -> bool:
    return len(job.processes) > 1


def _barrier(job: TimingJob) -> None:
    """Wait for all processes of a job. gloo's reduce-scatter fails if a process arrives 30 s late;
    its all-reduce does not."""
    if _is_shared(job):
        jax.block_until_ready(_barrier_call(job.devices)())


@cache
def _barrier_call(devices: tuple[jax.Device, ...]) -> Call:
    return collective_call("all_reduce", Mesh(np.array([devices]), ("node", "rank")), 1)


# ---- the profile ----


def profile_key(
    model: MultimodalModel,
    devices: Sequence[jax.Device],
    shapes: Mapping[str, Sequence[Shape]],
    *extra_facts: Any,
) -> str:
    """Return a digest of the programs, shapes, devices and versions that a profile depends on."""
    programs = [
        Lowering(shallow_segment(model, m, 1, devices, MeshShape(), kind=kind))
        .lower(shapes[m][0], BACKWARD)
        .as_text()
        for m, module in model.modules.items()
        for kind in dict.fromkeys(layer_kinds_of(module))
    ]
    names = [f.name for kind in (LayerTiming, Recompute, TimedPrograms) for f in fields(kind)]
    content = {m: list(content_of(module, 1)) for m, module in model.modules.items()}
    device, given = devices[0], msgspec.to_builtins((shapes, extra_facts))
    machine = device.platform, device.device_kind, len(devices), TASK_HOST_S, jax.__version__
    facts = programs, names, content, given, machine
    return digest(facts)


def model_profile(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[Shape]],
    timings: Sequence[LayerTiming],
    devices: Sequence[jax.Device],
    *,
    key: str,
    untimed: Mapping[str, Sequence[Shape]] = MappingProxyType({}),
) -> ModelProfile:
    """Return the profile of measured timings, with the costs of every recompute policy. Its
    `concurrency` is the number of devices; see `timed_programs.measure_concurrent_rate`.

    Args:
      shapes: all shapes of every module.
      untimed: those that were not to be timed; of these, the ones that determine the fits are
        extrapolated.
    """
    device, with_policies = devices[0], []
    for module, kind, tp in dict.fromkeys((t.module, t.kind, t.model) for t in timings):
        predictor = Predictor(
            restrict_to_layer_kind(on_chip(model.modules[module], chip_of(device)), kind),
            edge_fields(model, module),
            tp,
            hardware_of_kind(device.device_kind),
            half_bytes=4 if device.platform == "cpu" else 2,
        )
        measured = [t for t in timings if (t.module, t.kind, t.model) == (module, kind, tp)]
        missing = [s for s in shapes_to_trace(shapes[module]) if s in untimed.get(module, ())]
        one_piece_rows = module in model.piece_tokens
        with_policies += predictor.add_policies(
            [*measured, *_extrapolate(predictor, measured, missing, one_piece_rows)]
        )
    return build_profile(
        model,
        shapes,
        with_policies,
        key=key,
        device=device.device_kind,
        concurrency=float(len(devices)),
        task_overhead_s=measure_overhead_s(device),
        priced_by=f"programs timed on {device.device_kind}",
    )


def _extrapolate(
    predictor: Predictor,
    measured: Sequence[LayerTiming],
    shapes: Sequence[Shape],
    one_piece_rows: bool,
) -> list[LayerTiming]:
    """Return timings at other shapes: the roofline model's, multiplied by the ratio of the measured
    to the model's at the measured shape of the nearest size."""
    if not shapes:
        return []
    by_shape = {t.shape: t for t in measured}
    every = sorted({*by_shape, *shapes}, key=lambda s: (s.size, s))
    predicted = {t.shape: t for t in predictor.timings(every, one_piece_rows=one_piece_rows)}

    def extrapolate(shape: Shape) -> LayerTiming:
        nearest_shape = min(by_shape, key=lambda s: abs(math.log(s.size / shape.size)))
        timing, roofline = by_shape[nearest_shape], predicted[nearest_shape]
        target = predicted[shape]
        program_bytes = _scale(
            timing.recompute["none"],
            roofline.recompute["none"],
            target.recompute["none"],
            _PROGRAM_BYTES,
        )
        return replace(
            _scale(timing, roofline, target, _SECONDS),
            module=timing.module,
            kind=timing.kind,
            content_forward_s=timing.content_forward_s,
            content_backward_s=timing.content_backward_s,
            recompute={"none": program_bytes},
        )

    return [extrapolate(s) for s in shapes]


def _scale(measured: T, predicted: T, target: T, names: Sequence[str]) -> T:
    """Return `target` with fields multiplied by their ratio of measured to predicted."""
    ratios = {n: getattr(measured, n) / (getattr(predicted, n) or math.inf) for n in names}
    changes: dict[str, Any] = {n: ratio * getattr(target, n) for n, ratio in ratios.items()}
    return replace(target, **changes)
