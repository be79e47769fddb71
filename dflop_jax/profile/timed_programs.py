"""Compiles a segment's programs and times them on the devices with random arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax

from dflop_jax.profile.traced_parts import hidden_bytes
from dflop_jax.records import BACKWARD, FORWARD, Shape
from dflop_jax.runtime.communicator import shard_array, zeros
from dflop_jax.runtime.compiling import threads_for
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import EVALUATE, Segment
from dflop_jax.runtime.synthetic_batch import packed_field, random_values

Run = Callable[[], Any]
# Runs of each program, and seconds of all its runs after which no more than the least are made:
# twice as many take twice as long, for a median that scatters less by a third.
MIN_RUNS, MAX_RUNS, MAX_RUNS_S = 3, 25, 0.5


@dataclass(frozen=True)
class TimedPrograms:
    """A segment's compiled programs with their arguments, and the bytes that they need.

    `runs`: for each number of pieces in a row, calls of forward and of backward. Backward starts
    from the residuals of forward (`residual_bytes`), or runs forward itself.
    """

    runs: tuple[tuple[Run, Run], ...]
    temp_bytes: float
    residual_bytes: float
    hidden_bytes: float
    saves_residuals: bool


def median_seconds(
    runs: Sequence[Run],
    clock: Callable[[], float] = time.perf_counter,
    *,
    max_runs: int = MAX_RUNS,
) -> list[float]:
    """Median seconds of each of several awaited calls. After a warm-up they run in turns, so that a
    disturbance of the machine affects all of them alike."""
    for run in runs:
        jax.block_until_ready(run())
    run_seconds: list[list[float]] = [[] for _ in runs]
    begin_s = clock()
    for n in range(max_runs):
        if n >= MIN_RUNS and clock() - begin_s > MAX_RUNS_S * len(runs):
            break
        for run, seconds in zip(runs, run_seconds, strict=True):
            start_s = clock()
            jax.block_until_ready(run())
            seconds.append(clock() - start_s)
    return [median(seconds) for seconds in run_seconds]


def place_random(struct: jax.ShapeDtypeStruct, below: int) -> jax.Array:
    return shard_array(random_values(struct.shape, struct.dtype, below), struct.sharding)


def place_packed_rows(fields: Mapping[str, jax.ShapeDtypeStruct], n_pieces: int, below: int) -> Any:
    """Fields of rows that are filled with about `n_pieces` pieces of equal length each."""
    return {
        name: shard_array(packed_field(name, s.shape, s.dtype, n_pieces, below), s.sharding)
        for name, s in fields.items()
    }


def compile_timed_programs(
    segments: Sequence[Segment], shape: Shape, below: int, piece_counts: Sequence[int]
) -> list[TimedPrograms]:
    """Forward with its loss, and backward, of each segment, on rows of each number of pieces."""
    compiling = []
    with ThreadPoolExecutor(threads_for(segments)) as pool:
        for segment in segments:
            kind = EVALUATE if segment.has_loss else FORWARD  # else nothing would ask for the loss
            lowering = Lowering(segment)
            job = pool.submit(lowering.lower(shape, kind).compile)
            if segment.compiles_forward_first:
                lowering.set_residual_shardings(shape, job.result())
            compiling.append((lowering, job, pool.submit(lowering.lower(shape, BACKWARD).compile)))
    timed = []
    for lowering, job, backward_job in compiling:
        forward, backward = job.result(), backward_job.result()
        params, x, batch_runs = prepare_backward(lowering, backward, shape, below, piece_counts)
        runs = tuple((partial(forward, params, x, batch), run) for batch, run in batch_runs)
        temp = getattr(backward.memory_analysis(), "temp_size_in_bytes", 0)
        residual_bytes, segment = lowering.residual_bytes(shape), lowering.segment
        hidden = hidden_bytes(segment.module, shape)
        timed.append(
            TimedPrograms(runs, float(temp), residual_bytes, hidden, segment.saves_residuals)
        )
    return timed


def prepare_backward(
    lowering: Lowering,
    backward: jax.stages.Compiled,
    shape: Shape,
    below: int,
    piece_counts: Sequence[int],
) -> tuple[Any, Any, list[tuple[Any, Run]]]:
    """(backward's parameters, its inputs, and for each number of pieces its fields and a call)."""
    params, x, fields, dy, grads, residuals = lowering.argument_structs(shape, BACKWARD)
    params, x, dy, residual_values = jax.tree.map(
        partial(place_random, below=below), (params, x, dy, residuals)
    )
    grads_donated = [jax.tree.map(zeros, grads)]  # donated by each call, and given back

    def run_backward(batch: Any) -> Any:
        _, dx, grads_donated[0], done = backward(
            params, x, batch, dy, grads_donated[0], residual_values
        )
        return dx, done

    batches = [place_packed_rows(fields, n, below) for n in piece_counts]
    return params, x, [(batch, partial(run_backward, batch)) for batch in batches]
