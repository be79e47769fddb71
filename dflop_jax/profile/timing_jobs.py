"""Which processes time which programs of a profile: jobs for groups of devices, done at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax

from dflop_jax.contract import MultimodalModel
from dflop_jax.pipeline.out_of_memory import ran_out
from dflop_jax.profile.measure import LEAST_RUNS, MOST_RUNS, time_layer
from dflop_jax.profile.parts import divides
from dflop_jax.records import LayerTiming, Shape

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TimingJob:
    """A module at a per-rank shape, to be timed on as many `devices` as its tensor-parallel degree.
    Where they are of several processes, these all time it, and the first one's figures count."""

    module: str
    shape: Shape
    devices: tuple[jax.Device, ...]

    @property
    def processes(self) -> list[int]:
        return sorted({d.process_index for d in self.devices})

    @property
    def most_runs(self) -> int:
        """Of every program: several processes, whose clocks differ, have to run as often."""
        return MOST_RUNS if len(self.processes) == 1 else LEAST_RUNS


def timing_jobs(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[Shape]],
    blocks: Sequence[Sequence[tuple[jax.Device, ...]]],
) -> list[TimingJob]:
    """Every module at its `shapes` on every tensor-parallel degree that its sizes divide by.

    Args:
      blocks: for every degree, groups of as many devices, which time different jobs at once.
    """
    of_degree = {len(groups[0]): groups for groups in blocks}
    asked = [
        (m, degree, shape)
        for degree in of_degree
        for m, module in model.modules.items()
        if divides(module, degree)
        for shape in shapes[m]
    ]
    return [
        TimingJob(m, shape, of_degree[degree][i % len(of_degree[degree])])
        for i, (m, degree, shape) in enumerate(asked)
    ]


def time_layers(
    model: MultimodalModel, jobs: Sequence[TimingJob], on_progress: Progress | None = None
) -> list[LayerTiming]:
    """Time this process's jobs; of a module's shapes all but the least may be too large for the
    device's memory, and are left out then."""
    least = {j.module: min(k.shape for k in jobs if k.module == j.module) for j in jobs}
    here = jax.process_index()
    mine = [j for j in jobs if here in j.processes]
    timings: list[LayerTiming] = []
    for i, job in enumerate(mine):
        try:
            timing = time_layer(model, job.module, job.shape, job.devices, most_runs=job.most_runs)
            if here == job.processes[0]:
                timings.append(timing)
        except jax.errors.JaxRuntimeError as e:
            if not ran_out(e) or job.shape == least[job.module]:
                raise
        if on_progress:
            on_progress(i + 1, len(mine))
    return timings
