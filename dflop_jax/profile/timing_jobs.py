"""Distributes the programs of a profile over processes and times them, several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import numpy as np
from jax.sharding import Mesh

from dflop_jax.contract import MultimodalModel, layer_kinds_of
from dflop_jax.profile.links import Call, collective_call
from dflop_jax.profile.measure import time_layer
from dflop_jax.profile.timed_programs import MAX_RUNS, MIN_RUNS
from dflop_jax.profile.traced_parts import divides
from dflop_jax.records import LAYERS, LayerTiming, Shape
from dflop_jax.runtime.out_of_memory import is_out_of_memory

Progress = Callable[[int, int], None]
_BARRIER_BYTES = 64  # that processes add up to meet; any number would do


@dataclass(frozen=True)
class TimingJob:
    """A module with layers of one kind at a per-rank shape, to time on as many `devices` as its
    tensor-parallel degree. If the devices belong to several processes, all of them time it, and the
    first process returns the timing."""

    module: str
    shape: Shape
    devices: tuple[jax.Device, ...]
    kind: str = LAYERS

    @property
    def processes(self) -> list[int]:
        return sorted({d.process_index for d in self.devices})

    @property
    def max_runs(self) -> int:
        """Runs of every program; several processes, whose clocks differ, have to run equally
        often."""
        return MAX_RUNS if len(self.processes) == 1 else MIN_RUNS


def timing_jobs(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[Shape]],
    blocks: Sequence[Sequence[tuple[jax.Device, ...]]],
) -> list[TimingJob]:
    """Jobs for every module and kind of layers at its `shapes`, at every tensor-parallel degree
    that divides its sizes.

    Args:
      blocks: for every degree, groups of as many devices, which time different jobs at once.
    """
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
    """Timings of this process's jobs; jobs of several processes come last. All shapes of a module
    but the smallest are left out if they exceed the device's memory. All processes call this with
    the same jobs; `sync` waits for them."""
    min_shape = {j.module: min(k.shape for k in jobs if k.module == j.module) for j in jobs}
    process = jax.process_index()
    own_jobs = sorted((j for j in jobs if process in j.processes), key=_is_shared)
    is_synced = not any(map(_is_shared, jobs))
    timings: list[LayerTiming] = []
    for i, job in enumerate(own_jobs):
        if _is_shared(job) and not is_synced:
            # gloo connects processes at their first collective, which may not wait for 30 s.
            is_synced = True
            sync()
            _barrier(job)
        try:
            timing = time_layer(
                model,
                job.module,
                job.shape,
                job.devices,
                kind=job.kind,
                max_runs=job.max_runs,
                sync=partial(_barrier, job),
            )
            if process == job.processes[0]:
                timings.append(timing)
        except jax.errors.JaxRuntimeError as e:
            if not is_out_of_memory(e) or job.shape == min_shape[job.module]:
                raise
        if on_progress:
            on_progress(i + 1, len(own_jobs))
    if not is_synced:
        sync()  # with those that have a part in shared jobs
    return timings


def _is_shared(job: TimingJob) -> bool:
    return len(job.processes) > 1


def _barrier(job: TimingJob) -> None:
    """Wait for all processes of a job. gloo's scattering reductions fail if a process arrives 30 s
    late; its all-reduce does not."""
    if not _is_shared(job):
        return
    jax.block_until_ready(_barrier_call(job.devices)())


@cache
def _barrier_call(devices: tuple[jax.Device, ...]) -> Call:
    mesh = Mesh(np.array([devices]), ("node", "rank"))
    return collective_call("all_reduce", mesh, _BARRIER_BYTES)
