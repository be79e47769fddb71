"""Timing of compiled segments of a few layers on the devices; XLA reports their memory.

Each (module, tensor-parallel degree, per-rank shape) is compiled at two depths; the difference
gives one layer and the rest the ends. This is the DFLOP Model Profiler's method (arXiv 2603.25120)
on whole programs, which include casts and the loss. Edges and taps between layers count with the
ends. Programs do not recompute; the cost of recompute policies is derived from these times and from
traces (`roofline`).

Programs run on random parameters and inputs (`runtime.calibration`), and rows are filled with
pieces without padding. If a module's attention kernel skips token pairs of different pieces
(`content_flops_of`), programs are timed with rows of one piece and with rows of several pieces;
the difference gives the cost of content."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflop_jax.contract import MultimodalModel, chip_of, content_flops_of, on_chip
from dflop_jax.profile.fit import DEPTHS, fit_nonnegative
from dflop_jax.profile.shallow import restrict_to_layer_kind, shallow_segment
from dflop_jax.profile.traced_parts import hidden_bytes, output_bytes
from dflop_jax.records import BACKWARD, FORWARD, LAYERS, LayerTiming, MeshShape, Recompute, Shape
from dflop_jax.runtime import calibration
from dflop_jax.runtime.calibration import PIECES_PER_ROW, content_of_rows, packed_field
from dflop_jax.runtime.communicator import shard_array, zeros
from dflop_jax.runtime.compiling import threads_for
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import EVALUATE, Segment

Run = Callable[[], Any]
# Minimum and maximum runs of each program; after MAX_RUNS_S seconds per program only the minimum is
# required. Twice as many runs reduce the median's scatter by a third.
MIN_RUNS, MAX_RUNS, MAX_RUNS_S = 3, 25, 0.5
# Pieces per row in timings that separate the cost of each content feature from the rest.
_PIECE_COUNTS = (1, 16, 4, 2, 8)


@dataclass(frozen=True)
class TimingJob:
    """Timing job: a module with one kind of layers at a per-rank shape, tensor-parallel over
    `devices`. If the devices belong to several processes, all of them run the job, and the first
    process returns the timing."""

    module: str
    shape: Shape
    devices: tuple[jax.Device, ...]
    kind: str = LAYERS

    @property
    def processes(self) -> list[int]:
        return sorted({d.process_index for d in self.devices})

    @property
    def max_runs(self) -> int:
        """Maximum runs; fixed for several processes, which must run programs equally often."""
        return MAX_RUNS if len(self.processes) == 1 else MIN_RUNS


def time_layer(
    model: MultimodalModel, job: TimingJob, sync: Callable[[], None] = lambda: None
) -> LayerTiming:
    """Time a module at a shape. `sync` waits for the job's processes after compilation."""
    shape, devices = job.shape, job.devices
    module = restrict_to_layer_kind(
        on_chip(model.modules[job.module], chip_of(devices[0])), job.kind
    )
    # If each row is one piece, the shape determines the content.
    flops = {} if job.module in model.piece_tokens else content_flops_of(module)
    piece_counts = _PIECE_COUNTS[: len(flops) + 1] if flops else (PIECES_PER_ROW,)
    row_pieces = [min(n, shape.tokens) for n in piece_counts]
    contents = [content_of_rows(module, shape, n) for n in row_pieces]
    mesh = MeshShape(model=len(devices))
    segments = [shallow_segment(model, job.module, d, devices, mesh, kind=job.kind) for d in DEPTHS]
    low, high = compile_timed_programs(segments, shape, model.vocab_size, row_pieces)
    runs = [
        run
        for low_runs, high_runs in zip(low.runs, high.runs, strict=True)
        for run in (*low_runs, *high_runs)
    ]
    sync()
    # [number of pieces per row, depth, direction]
    seconds = np.reshape(median_seconds(runs, job.max_runs), (-1, 2, 2))
    if not low.saves_residuals:
        seconds[..., 1] = np.maximum(seconds[..., 1] - seconds[..., 0], 0.0)
    forward, backward = (
        [_split_ends(*by_depth) for by_depth in seconds[..., i].tolist()] for i in range(2)
    )
    forward_s, content_forward_s = _split_content([s for s, _ in forward], contents, flops)
    backward_s, content_backward_s = _split_content([s for s, _ in backward], contents, flops)
    layer_temp = max(high.temp_bytes - low.temp_bytes, 0.0) / (DEPTHS[1] - DEPTHS[0])
    layer_residuals = (high.residual_bytes - low.residual_bytes) / (DEPTHS[1] - DEPTHS[0])
    residuals = Recompute(
        # In a backward that also runs forward, residuals are part of the temporaries.
        layer_bytes=layer_residuals if low.saves_residuals else layer_temp,
        temp_bytes=max(low.temp_bytes - DEPTHS[0] * layer_temp, 0.0),
    )
    return LayerTiming(
        module=job.module,
        model=len(devices),
        shape=shape,
        layer_forward_s=forward_s,
        layer_backward_s=backward_s,
        ends_forward_s=forward[0][1],
        ends_backward_s=backward[0][1],
        hidden_bytes=low.hidden_bytes,
        output_bytes=output_bytes(model.modules[job.module], shape),
        content_forward_s=content_forward_s,
        content_backward_s=content_backward_s,
        recompute={"none": residuals},
        kind=job.kind,
    )


def _split_ends(shallow: float, deep: float) -> tuple[float, float]:
    """Return (seconds of one layer, of both ends) from programs of the two depths."""
    # Noise can make the deeper program seem faster, so a layer has a minimum time.
    layer = max(deep - shallow, 0.02 * deep) / (DEPTHS[1] - DEPTHS[0])
    return layer, max(shallow - DEPTHS[0] * layer, 0.0)


def _split_content(
    layer_s: Sequence[float], contents: Sequence[Mapping[str, int]], flops: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return (a layer's seconds without content, seconds per unit of each content feature) from
    timings with rows of each content. Features that no row has are priced by their FLOPs."""
    if not flops:
        return layer_s[0], {}
    names = [name for name in flops if any(c[name] for c in contents)]
    features = [[1, *(c[name] for name in names)] for c in contents]
    static_s, *unit_s = fit_nonnegative(np.array(features, float), np.array(layer_s)).tolist()
    content_s = dict(zip(names, unit_s, strict=True))
    flop_s = sum(unit_s) / max(sum(flops[name] for name in names), 1.0)
    return static_s, {name: content_s.get(name, flop_s * f) for name, f in flops.items()}


def measure_concurrent_rate(
    model: MultimodalModel, shape: Shape, devices: Sequence[jax.Device]
) -> float:
    """Return the programs per second when all `devices` run the last module's one-layer backward at
    `shape` at the same time. Its ratio to the rate of one device is the concurrency."""
    last, n = list(model.modules)[-1], len(devices)
    lowering = Lowering(shallow_segment(model, last, 1, devices, MeshShape(data=n)))
    backward = lowering.lower(shape, BACKWARD).compile()
    *_, ((_, run),) = _prepare_backward(
        lowering, backward, shape, model.vocab_size, [PIECES_PER_ROW]
    )
    return n / median_seconds([run])[0]


def measure_flops_per_s(devices: Sequence[jax.Device], dtype: str) -> float:
    """Return the FLOP/s of matrix products on all `devices` at the same time."""
    n = 512 if devices[0].platform == "cpu" else 4096  # a few ms on a core or a GPU
    mesh = device_mesh(MeshShape(data=len(devices)), devices)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    values = calibration.random_values((len(devices), n, n), np.dtype(dtype), 0)
    x = shard_array(values, sharding)
    program = jax.jit(lambda a: a @ a, out_shardings=sharding).lower(x).compile()
    return 2.0 * n**3 * len(devices) / median_seconds([lambda: program(x)], MIN_RUNS)[0]


def measure_overhead_s(device: jax.Device) -> float:
    """Return the seconds of a blocking call of a trivial program."""
    x = jax.device_put(np.zeros(8, np.float32), jax.sharding.SingleDeviceSharding(device))
    program = jax.jit(lambda a: a + 1).lower(x).compile()
    return median_seconds([lambda: program(x)])[0]


# ---- programs ----


@dataclass(frozen=True)
class TimedPrograms:
    """A segment's compiled programs with their arguments, and the bytes that they need."""

    runs: tuple[tuple[Run, Run], ...]  # (forward, backward) for each number of pieces per row
    temp_bytes: float
    residual_bytes: float
    hidden_bytes: float
    saves_residuals: bool  # False: backward also runs forward


def median_seconds(runs: Sequence[Run], max_runs: int = MAX_RUNS) -> list[float]:
    """Return the median seconds of blocking calls, interleaved so that noise affects all alike."""
    for run in runs:
        jax.block_until_ready(run())
    run_seconds: list[list[float]] = [[] for _ in runs]
    begin_s = time.perf_counter()
    for n in range(max_runs):
        if n >= MIN_RUNS and time.perf_counter() - begin_s > MAX_RUNS_S * len(runs):
            break
        for run, seconds in zip(runs, run_seconds, strict=True):
            start_s = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - start_s)
    return [median(seconds) for seconds in run_seconds]


def compile_timed_programs(
    segments: Sequence[Segment], shape: Shape, vocab: int, piece_counts: Sequence[int]
) -> list[TimedPrograms]:
    """Compile forward with its loss and backward of each segment; see `TimedPrograms`."""
    compiling = []
    with ThreadPoolExecutor(threads_for(segments)) as pool:
        for segment in segments:
            kind = EVALUATE if segment.has_loss else FORWARD  # FORWARD does not compute the loss
            lowering = Lowering(segment)
            job = pool.submit(lowering.lower(shape, kind).compile)
            if segment.compiles_forward_first:
                lowering.set_residual_shardings(shape, job.result())
            compiling.append((lowering, job, pool.submit(lowering.lower(shape, BACKWARD).compile)))
    timed = []
    for lowering, job, backward_job in compiling:
        forward, backward, segment = job.result(), backward_job.result(), lowering.segment
        params, x, batch_runs = _prepare_backward(lowering, backward, shape, vocab, piece_counts)
        timed.append(
            TimedPrograms(
                tuple((partial(forward, params, x, batch), run) for batch, run in batch_runs),
                float(getattr(backward.memory_analysis(), "temp_size_in_bytes", 0)),
                lowering.residual_bytes(shape),
                hidden_bytes(segment.module, shape),
                segment.saves_residuals,
            )
        )
    return timed


def _prepare_backward(
    lowering: Lowering,
    backward: jax.stages.Compiled,
    shape: Shape,
    vocab: int,
    piece_counts: Sequence[int],
) -> tuple[Any, Any, list[tuple[Any, Run]]]:
    """Return (parameters, inputs, [(fields, backward call) for each number of pieces per row])."""
    params, x, fields, dy, grads, residuals = lowering.argument_structs(shape, BACKWARD)
    params, x, dy, residual_values = jax.tree.map(
        lambda a: shard_array(calibration.random_values(a.shape, a.dtype, vocab), a.sharding),
        (params, x, dy, residuals),
    )
    grads_donated = [jax.tree.map(zeros, grads)]  # each call donates and returns them

    def run_backward(batch: Any) -> Any:
        _, dx, grads_donated[0], done = backward(
            params, x, batch, dy, grads_donated[0], residual_values
        )
        return dx, done

    batches = [
        {
            name: shard_array(packed_field(name, a.shape, a.dtype, n, vocab), a.sharding)
            for name, a in fields.items()
        }
        for n in piece_counts
    ]
    return params, x, [(batch, partial(run_backward, batch)) for batch in batches]
