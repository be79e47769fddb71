"""Which processes time what; nothing is compiled."""

from types import SimpleNamespace

import jax
import pytest

from dflop_jax.profile import timing_jobs as jobs_module
from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.profile.timed_programs import MAX_RUNS, MIN_RUNS
from dflop_jax.profile.timing_jobs import time_layers, timing_jobs
from dflop_jax.records import MeshShape, Shape
from dflop_jax.runtime.parameter_layout import param_specs
from tests.small import Small

MODEL = Small()
SHAPES = {"vision": [Shape(2, 16)], "llm": [Shape(1, 32), Shape(2, 32), Shape(9, 32)]}


def devices(*processes):
    return [SimpleNamespace(process_index=p) for p in processes]


def test_every_job_is_timed_by_one_device_group():
    a, b, c = devices(0, 1, 2)
    jobs = timing_jobs(MODEL, SHAPES, [[(a,), (b,), (c,)], [(a, b)]])
    whole = [(m, s) for m in SHAPES for s in SHAPES[m]]
    for degree in (1, 2):
        assert [(j.module, j.shape) for j in jobs if len(j.devices) == degree] == whole
    assert [j.processes for j in jobs] == [[0], [1], [2], [0], *[[0, 1]] * 4]
    assert [j.max_runs for j in jobs] == [MAX_RUNS] * 4 + [MIN_RUNS] * 4
    assert timing_jobs(MODEL, SHAPES, []) == []


@pytest.mark.parametrize("process, n_timed, n_returned", [(0, 6, 6), (1, 6, 2), (2, 0, 0)])
def test_first_process_of_a_job_returns_its_timing(monkeypatch, process, n_timed, n_returned):
    """Jobs of process 0, of process 1, and of both together."""
    calls = []
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jobs_module, "time_layer", lambda *a, **k: calls.append(k) or a[1:3])
    a, b = devices(0, 1)
    barriers = []
    monkeypatch.setattr(jobs_module, "_barrier", lambda job: barriers.append(len(calls)))
    jobs = timing_jobs(MODEL, SHAPES, [[(a, b)], [(a,), (b,)]])
    assert len([j for j in jobs if process in j.processes]) == n_timed
    syncs = []
    assert len(time_layers(MODEL, jobs, sync=lambda: syncs.append(len(calls)))) == n_returned
    assert len(calls) == n_timed
    # All processes wait once, those with shared jobs before the first of them.
    assert syncs == [2 * (n_timed > 0)]
    assert barriers == ([2] if n_timed else [])
    assert time_layers(MODEL, [], sync=lambda: 1 / 0) == []


def test_degrees_that_divide_no_sizes_are_left_out():
    """Sizes of 8 and 12 split in 2 and not in 5."""
    every = jax.devices()
    jobs = timing_jobs(MODEL, SHAPES, [[tuple(every[:d])] for d in (1, 2, 5)])
    assert {len(j.devices) for j in jobs} == {1, 2}
    with pytest.raises(ValueError, match="does not divide"):
        param_specs(shallow_segment(MODEL, "llm", 1, every[:5], MeshShape(model=5)))


def test_shapes_beyond_memory_are_left_out(monkeypatch):
    def fake(model, module, shape, devices, **_):
        if shape.rows > limit:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return module, shape

    monkeypatch.setattr(jobs_module, "time_layer", fake)
    jobs = timing_jobs(MODEL, SHAPES, [[tuple(jax.devices()[:1])]])
    for limit in (2, 9):
        got = time_layers(MODEL, jobs)
        assert got == [(m, s) for m in SHAPES for s in SHAPES[m] if s.rows <= limit]
    limit = 1
    with pytest.raises(jax.errors.JaxRuntimeError):  # not even the smallest
        time_layers(MODEL, jobs)
