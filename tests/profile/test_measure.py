"""Which shapes are timed, by which processes, what is measured, and the name that it is kept by;
never how long it took."""

import dataclasses
import time
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import jax
import numpy as np
import pytest

from dflop_jax.hardware import HARDWARE
from dflop_jax.profile import measure, timed_programs
from dflop_jax.profile.measure import (
    model_profile,
    order_to_time,
    profile_key,
    shapes_to_time,
    shapes_within,
    time_layers,
    timing_jobs,
)
from dflop_jax.profile.roofline import Predictor
from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.profile.timed_programs import MAX_RUNS, MIN_RUNS, TimedPrograms
from dflop_jax.records import DataProfile, Edge, Load, MeshShape, Shape
from dflop_jax.runtime.calibration import content_of_rows
from dflop_jax.runtime.parameter_layout import param_specs
from tests.mixed import MADE, HandingText, Mixed
from tests.small import MERGE, WIDTH, Small, Text

MODEL = Small()
SHAPES = {"vision": [Shape(2, 16)], "llm": [Shape(1, 32), Shape(2, 32), Shape(9, 32)]}

# ---- shapes ----


def shapes_of(*loads, piece_tokens=None, multiple=32):
    model = SimpleNamespace(modules={"m": None}, piece_tokens=piece_tokens or {})
    data = DataProfile("d", len(loads), tuple(Load({"m": n}) for n in loads))
    return shapes_to_time(data, model, multiple)["m"]


def test_shapes_by_hand():
    """Of one piece a row from an eighth of the largest sample's pieces to four times as many; of a
    packed module rows of a quarter, of all and of twice the longest piece, and several rows."""
    tiles = {"m": 16}
    got = shapes_of((16,) * 40, (16,), (), piece_tokens=tiles)
    assert got == [Shape(n, 16) for n in (5, 20, 40, 160)]
    assert shapes_of((16,), piece_tokens=tiles) == [Shape(n, 16) for n in (1, 2, 3, 4)]
    got = shapes_of((300,), (100,))
    assert got == [Shape(1, 96), Shape(1, 320), Shape(1, 640), Shape(4, 96), Shape(4, 320)]
    assert shapes_of((), ()) == [Shape(1, 32), Shape(2, 32)]  # the data lack the module
    assert shapes_of((), (), piece_tokens=tiles) == [Shape(1, 16), Shape(2, 16)]


@pytest.mark.parametrize("multiple", [1, 32, 128])
def test_every_piece_fits_and_sizes_spread(multiple):
    rng = np.random.default_rng(multiple)
    for _ in range(50):
        loads = [
            tuple(rng.integers(1, 2000, int(rng.integers(0, 6))).tolist())
            for _ in range(int(rng.integers(1, 8)))
        ]
        got = shapes_of(*loads, multiple=multiple)
        assert all(s.tokens % multiple == 0 for s in got)
        assert max(s.tokens for s in got) >= max((n for load in loads for n in load), default=0)
        assert max(s.size for s in got) >= max(sum(load) for load in loads)
        assert len(set(got)) > 1


def test_shapes_beyond_memory_are_left_out_and_a_sample_beyond_it_is_refused():
    """A square of attention of 4 bytes an element, as programs that mask have."""
    shapes = {"vision": shapes_of((300,), (100,))}

    def bytes_of(module, shape):
        return 4.0 * shape.rows * shape.tokens**2

    row = bytes_of("vision", Shape(1, 320))
    assert shapes_within(shapes, 16 * row, bytes_of) == shapes  # 640 tokens are four such rows
    got = shapes_within(shapes, 15.9 * row, bytes_of)
    assert got == {"vision": [Shape(1, 96), Shape(1, 320), Shape(4, 96)]}
    assert shapes_within(shapes, 1.71 * row, bytes_of)["vision"][1] == Shape(1, 320)
    with pytest.raises(ValueError, match=r"320 tokens of 'vision' in a row.* --data\.max_pixels$"):
        shapes_within(shapes, 1.69 * row, bytes_of)
    with pytest.raises(ValueError, match=r"'llm' in a row.*lower --data\.max_tokens or --data\.m"):
        shapes_within({"llm": shapes["vision"]}, 1.0, bytes_of)


def test_the_shape_like_the_largest_sample_is_timed_first():
    """A sample of 300 tokens is near to 1 x 256; then the largest, the smallest and the rest."""
    loads = (*[Load({"m": (60, 40)})] * 4, Load({"m": (100,) * 3}), Load({}))
    shapes = [Shape(1, 32), Shape(4, 32), Shape(1, 256), Shape(1, 512), Shape(4, 256)]
    got = order_to_time(shapes, DataProfile("d", 6, loads), "m")
    assert got == [Shape(1, 256), Shape(4, 256), Shape(1, 32), Shape(1, 512), Shape(4, 32)]
    unused = order_to_time(shapes[:2], DataProfile("d", 1, (Load({}),)), "m")
    assert unused == [Shape(1, 32), Shape(4, 32)]
    assert order_to_time(shapes[:1], DataProfile("d", 6, loads), "m") == shapes[:1]


# ---- jobs ----


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


def test_degrees_that_divide_no_sizes_are_left_out():
    """Sizes of 8 and 12 split in 2 and not in 5."""
    every = jax.devices()
    jobs = timing_jobs(MODEL, SHAPES, [[tuple(every[:d])] for d in (1, 2, 5)])
    assert {len(j.devices) for j in jobs} == {1, 2}
    with pytest.raises(ValueError, match="does not divide"):
        param_specs(shallow_segment(MODEL, "llm", 1, every[:5], MeshShape(model=5)))


@pytest.mark.parametrize("process, n_timed, n_returned", [(0, 6, 6), (1, 6, 2), (2, 0, 0)])
def test_first_process_of_a_job_returns_its_timing(monkeypatch, process, n_timed, n_returned):
    """Jobs of process 0, of process 1, and of both together."""
    calls, barriers, syncs = [], [], []
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(timed_programs, "time_layer", lambda *a: calls.append(a) or a)
    monkeypatch.setattr(measure, "_barrier", lambda job: barriers.append(len(calls)))
    a, b = devices(0, 1)
    jobs = timing_jobs(MODEL, SHAPES, [[(a, b)], [(a,), (b,)]])
    assert len(time_layers(MODEL, jobs, sync=lambda: syncs.append(len(calls)))) == n_returned
    assert len(calls) == n_timed
    # All processes wait once, those with shared jobs before the first of them.
    assert syncs == [2 * (n_timed > 0)]
    assert barriers == ([2] if n_timed else [])
    assert time_layers(MODEL, [], sync=lambda: 1 / 0) == []


def test_shapes_beyond_the_device_are_left_out(monkeypatch):
    def fake(model, job, sync):
        if job.shape.rows > limit:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return job.module, job.shape

    monkeypatch.setattr(timed_programs, "time_layer", fake)
    jobs = timing_jobs(MODEL, SHAPES, [[tuple(jax.devices()[:1])]])
    for limit in (2, 9):
        got = time_layers(MODEL, jobs)
        assert got == [(m, s) for m in SHAPES for s in SHAPES[m] if s.rows <= limit]
    limit = 1
    with pytest.raises(jax.errors.JaxRuntimeError):  # not even the smallest
        time_layers(MODEL, jobs)


# ---- timings ----


def timed(model, shapes, devices):
    return time_layers(model, timing_jobs(model, shapes, [[tuple(devices)]]))


def test_timings_and_the_models_facts_make_a_profile(monkeypatch):
    """Of an LLM with layers of two kinds, whose hidden states are a tree."""
    devices, shapes = jax.devices()[:1], {m: s[:1] for m, s in SHAPES.items()}
    model = Mixed(pattern="gmmm", text=HandingText)
    monkeypatch.setattr(timed_programs, "MAX_RUNS", 3)
    timings = timed(model, shapes, devices)
    profile = model_profile(model, shapes, timings, devices, key="k")
    assert [t.layers for t in profile.timings] == ["vision", "llm.gate", "llm.mean"]
    assert [t.shape for t in profile.timings] == [Shape(2, 16), Shape(1, 32), Shape(1, 32)]
    assert all(t.layer_forward_s + t.ends_forward_s > 0 for t in profile.timings)
    # Forward may seem to take as long as both directions of so small a module on a busy machine.
    assert any(t.layer_backward_s + t.ends_backward_s > 0 for t in profile.timings)
    for t in profile.timings:
        again = [t.recompute[r].layer_s for r in ("none", "dots", "named", "layers")]
        assert again[0] == 0.0 <= again[1] <= again[2] <= again[3] <= t.layer_forward_s
        kept = [t.recompute[r].layer_bytes for r in ("layers", "named", "dots", "none")]
        assert kept == sorted(kept)
        assert t.module == "llm" or kept[0] == pytest.approx(t.hidden_bytes)
        assert t.content_forward_s == t.content_backward_s == {}  # attention takes whole rows
    assert profile.edges == (Edge("vision", "llm", "visual"),)
    assert (profile.tied, profile.piece_tokens) == (("llm",), {"vision": 16})
    assert profile.n_layers == {"vision": 2, "llm": 4}
    hidden = {t.module: t.hidden_bytes for t in profile.timings}
    assert hidden == {"vision": 2 * 16 * WIDTH * 4, "llm": 32 * (WIDTH + MADE) * 4}
    output = {t.module: t.output_bytes for t in profile.timings}
    assert output == {"vision": 2 * 16 // MERGE * WIDTH * 4, "llm": 0.0}  # a loss is no feature


def test_untimed_shapes_are_extrapolated_by_the_roofline_model():
    """Timings three times as long as the model's are so at other shapes, too; of two measured
    shapes the nearest in size counts."""
    shapes = [Shape(1, 32), Shape(4, 32), Shape(1, 128), Shape(8, 64)]
    sheet = HARDWARE["cpu"]
    predictor = Predictor(MODEL.modules["llm"], ("visual",), 1, sheet, half_bytes=4)
    model = {t.shape: t for t in predictor.timings(shapes, one_piece_rows=False)}

    def measured(shape, factor):
        whole = dataclasses.replace(model[shape], module="llm").scaled(factor)
        n_bytes = dataclasses.replace(whole.recompute["none"], layer_bytes=100.0 * factor)
        return dataclasses.replace(whole, recompute={"none": n_bytes})

    timings = [measured(Shape(1, 32), 3.0), measured(Shape(1, 128), 5.0)]
    names = "layer_forward_s", "layer_backward_s", "ends_forward_s", "ends_backward_s"
    for n_timed, factors in ((1, (3.0, 3.0)), (2, (5.0, 5.0))):
        got = measure._extrapolate(predictor, timings[:n_timed], [shapes[1], shapes[3]], False)
        assert [t.shape for t in got] == [shapes[1], shapes[3]]
        for t, factor in zip(got, factors, strict=True):
            assert (t.module, t.hidden_bytes) == ("llm", model[t.shape].hidden_bytes)
            for name in names:
                want = factor * getattr(model[t.shape], name)
                assert getattr(t, name) == pytest.approx(want, rel=1e-9)
    assert measure._extrapolate(predictor, timings, [], False) == []


@pytest.mark.parametrize("took_s, n_runs", [((0.01, 0.02), 25), ((0.04, 0.01), 13), ((3, 2), 3)])
def test_programs_are_timed_in_turns_for_a_bounded_time(monkeypatch, took_s, n_runs):
    """A clock played by hand; one run in the middle is disturbed."""
    now, calls = [0.0], []

    def run(i):
        calls.append(i)
        now[0] += took_s[i] * (10 if len(calls) == 5 else 1)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    got = timed_programs.median_seconds([lambda: run(0), lambda: run(1)])
    assert got == pytest.approx(took_s)
    assert calls == [0, 1] * (n_runs + 1)  # one to warm up


@dataclass(frozen=True)
class SkippingText(Text):
    """An LLM whose attention costs by the pairs of its pieces."""

    skips = True
    attention_flops = MappingProxyType({"pair": 4.0})


class Skipping(Small):
    @property
    def modules(self):
        return super().modules | {"llm": SkippingText(4)}


def test_content_seconds_are_split_by_feature():
    """A layer of 2 s, 1e-2 s a pair and 0.5 s a piece of a made-up feature; of another there is
    nothing in any filling, so that it costs for its FLOPs what these two do."""
    module = SimpleNamespace(
        content=lambda n, placed: {"none": 0, "piece": int(n > 0), "pair": n * n}
    )
    contents = [content_of_rows(module, Shape(3, 48), n) for n in (1, 16, 5)]
    assert contents[2] == {"none": 0, "piece": 15, "pair": 3 * (4 * 10**2 + 8**2)}
    seconds = [2 + 1e-2 * c["pair"] + 0.5 * c["piece"] for c in contents]
    flops = {"pair": 2.0, "none": 4.0, "piece": 8.0}
    static_s, content_s = timed_programs._split_content(seconds, contents, flops)
    assert static_s == pytest.approx(2.0, rel=1e-4)
    want = {"pair": 1e-2, "none": 4 * 0.51 / 10, "piece": 0.5}
    assert content_s == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("saves", [True, False])
def test_pair_seconds_come_from_two_piece_counts(monkeypatch, saves):
    """A clock played by hand: a layer of 2 s and 3 s, 1e-2 s and 3e-2 s a pair, ends of 7 s. A
    backward program that does not get forward's residuals runs forward itself."""
    calls = []

    def fakes(segments, shape, below, pieces):
        calls.append(len(pieces))
        return [fake(segment, shape, pieces) for segment in segments]

    def fake(segment, shape, pieces):
        runs, n = [], segment.plan.n_layers
        for count in pieces:
            pairs = content_of_rows(segment.module, shape, count)["pair"]
            runs.append((7 + n * (2 + 1e-2 * pairs), 7 + n * (3 + 3e-2 * pairs)))
        return TimedPrograms(tuple(runs), 10.0 * n + 5, 8.0 * n + 1, 64.0, saves)

    monkeypatch.setattr(timed_programs, "compile_timed_programs", fakes)
    monkeypatch.setattr(timed_programs, "median_seconds", lambda runs, max_runs: runs)
    shapes = {"vision": [], "llm": [Shape(2, 48)]}
    (t,) = timed(Skipping(), shapes, jax.devices()[:1])
    seen = t.layer_forward_s, t.content_forward_s["pair"], t.ends_forward_s
    assert seen == pytest.approx((2.0, 1e-2, 7.0))
    seen = t.layer_backward_s, t.content_backward_s["pair"], t.ends_backward_s
    assert seen == pytest.approx((3.0, 3e-2, 7.0) if saves else (1.0, 2e-2, 0.0), abs=1e-9)
    assert (t.recompute["none"].temp_bytes, t.hidden_bytes) == (5.0, 64.0)
    assert t.recompute["none"].layer_bytes == (8.0 if saves else 10.0)
    (t,) = timed(MODEL, shapes, jax.devices()[:1])
    assert t.content_forward_s == t.content_backward_s == {}
    assert calls == [2, 1]  # whole rows are timed once


def test_profile_key_depends_on_programs_and_shapes():
    devices, shapes = jax.devices()[:1], {"vision": [Shape(1, 16)], "llm": [Shape(1, 32)]}
    key = profile_key(MODEL, devices, shapes, "more")
    assert key == profile_key(MODEL, devices, shapes, "more")
    untied = profile_key(Small(tied=False), devices, shapes, "more")
    mixed = profile_key(Mixed(pattern="gmmm"), devices, shapes, "more")
    longer = profile_key(MODEL, devices, {**shapes, "llm": [Shape(1, 64)]}, "more")
    assert len({key, untied, mixed, longer, profile_key(MODEL, devices, shapes)}) == 5
