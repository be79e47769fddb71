"""Bytes of segments: predictions against XLA, and a step's bytes by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dflop_jax.pipeline.segment import AXES, Segment
from dflop_jax.pipeline.spmd_loop import PARTS
from dflop_jax.profile.memory import (
    ProgramBytes,
    abstract_segment,
    compiled_bytes,
    extrapolated_bytes,
    quick_bytes,
    segment_bytes,
    with_depth,
    work_of,
)
from dflop_jax.records import BACKWARD, FORWARD, ModuleShape, SegmentPlan, SubmeshPlan
from models.decoder import DecoderModule
from models.llava import build
from models.sizes import DECODERS

NANO = build("nano")
DEEP = DecoderModule(dataclasses.replace(DECODERS["nano"], n_layers=12, tied=False), jnp.float32)
ROWS = ModuleShape(2, 128)


def segment(module, mesh=(1, 1, 1), microbatches=1, remat=False, start=0, stop=None):
    stop = module.n_layers if stop is None else stop
    n = int(np.prod(mesh))
    return Segment(
        plan=SegmentPlan(
            "s",
            "llm",
            start,
            stop,
            "s",
            start == 0,
            stop == module.n_layers,
            "layers" if remat else "none",
        ),
        module=module,
        mesh=Mesh(np.array(jax.devices()[:n]).reshape(mesh), AXES),
        microbatches=microbatches,
        trainable=frozenset(PARTS),
        sends_gradient=True,
    )


def abstract(s):
    submesh = SubmeshPlan("s", 0, *(s.mesh.shape[a] for a in AXES))
    return abstract_segment(
        s.module,
        s.plan,
        submesh,
        microbatches=s.microbatches,
        trainable=s.trainable,
    )


@pytest.mark.parametrize(
    "direction, mesh, microbatches",
    [(FORWARD, (1, 1, 2), 1), (BACKWARD, (1, 1, 1), 1), (BACKWARD, (2, 1, 2), 2)],
)
def test_two_shallow_stacks_tell_of_the_whole(direction, mesh, microbatches):
    whole = segment(DEEP, mesh, microbatches)
    compiled = compiled_bytes(whole, ROWS, direction)
    got = extrapolated_bytes(whole, ROWS, direction)
    assert got.total == pytest.approx(compiled.total, rel=0.03)
    # What is not temporary is linear to the byte.
    for name in ("arguments", "outputs", "aliased"):
        assert getattr(got, name) == pytest.approx(getattr(compiled, name), rel=1e-3)


@pytest.mark.parametrize(
    "direction, mesh, microbatches, remat",
    [
        (FORWARD, (2, 2, 1), 2, False),
        (BACKWARD, (1, 1, 1), 1, False),
        (BACKWARD, (1, 2, 2), 1, True),
        (BACKWARD, (2, 2, 1), 2, False),
    ],
)
def test_the_quick_form_is_exact_but_for_temporaries(direction, mesh, microbatches, remat):
    s = segment(DEEP, mesh, microbatches, remat)
    compiled, quick = (f(s, ROWS, direction) for f in (compiled_bytes, quick_bytes))
    # XLA rounds each buffer up, and tells the program where its results go.
    for name in ("arguments", "outputs", "aliased"):
        want = getattr(compiled, name)
        assert getattr(quick, name) == pytest.approx(want, rel=1e-3, abs=1024), name
    if direction == BACKWARD:
        assert quick.total == pytest.approx(compiled.total, rel=0.25)


def test_backward_keeps_what_is_counted_per_layer():
    """The slope of XLA's temporaries over depth, in float32."""
    # With remat a layer keeps little, and a nano layer's angles weigh much beside it.
    for remat, close in ((False, 0.05), (True, 0.25)):
        s = segment(DEEP, remat=remat)
        four, eight = (compiled_bytes(with_depth(s, n), ROWS, BACKWARD).temporaries for n in (4, 8))
        work = work_of(DEEP, ROWS, 1, remat=remat)
        per_layer = work.activations + work.casts + work.gradients
        assert per_layer == pytest.approx((eight - four) / 4, rel=close)


def test_work_grows_with_layers_and_ticks_as_stated():
    work = work_of(DEEP, ROWS, 1)
    a, c, g = work.activations, work.casts, work.gradients
    assert work.temporaries(0, 1) == work.alive
    assert work.temporaries(3, 1) == pytest.approx(3 * (a + c + g) + work.alive)
    assert work.temporaries(3, 4) == pytest.approx(3 * (5 * a + 2 * c + g) + work.alive)
    inner = work_of(DEEP, ROWS, 1, parts=("layers",))
    assert inner.alive < work.alive


def test_no_device_is_needed_for_a_thousand():
    s = segment(DEEP, (2, 1, 2), 2)
    for direction in (FORWARD, BACKWARD):
        assert quick_bytes(abstract(s), ROWS, direction) == quick_bytes(s, ROWS, direction)
    plan = SegmentPlan("llm", "llm", 0, 12, "llm", True, True)
    wide = abstract_segment(DEEP, plan, SubmeshPlan("llm", 0, 4, 128, 2), microbatches=4)
    assert quick_bytes(wide, ROWS, BACKWARD).total > 0
    three = abstract_segment(DEEP, plan, SubmeshPlan("llm", 0, 1, 1, 3))
    with pytest.raises(ValueError, match="does not divide over model=3"):
        quick_bytes(three, ROWS, BACKWARD)


def test_a_step_by_hand():
    s = segment(DEEP, (1, 2, 1))
    n_parameters = sum(int(np.prod(a.shape)) for a in jax.tree.leaves(s.param_structs()))
    fixed = ProgramBytes(1e9, outputs=300.0, temporaries=5000.0, aliased=100.0)
    got = segment_bytes(s, [ROWS], 3, program=lambda *_: fixed)
    assert got.parameters == got.gradients == 4 * n_parameters
    assert got.optimizer == 2 * 4 * n_parameters / 2
    tokens = ROWS.size
    inputs = tokens * (4 * DEEP.size.width + 5 * 4 + 1)  # visual; five fields, is_visual
    assert got.kept == 3 * inputs
    assert got.temporaries == 5200.0
    assert got.total == sum(dataclasses.astuple(got))


def test_the_largest_bucket_counts_and_empty_ones_do_not():
    s = segment(NANO.modules["llm"])
    small, large = ModuleShape(1, 64), ModuleShape(4, 64)
    both = segment_bytes(s, [large, ModuleShape(0, 64), small], 2)
    assert both == segment_bytes(s, [large], 2)
    assert both.kept == 4 * segment_bytes(s, [small], 2).kept
    none = segment_bytes(s, [], 2)
    assert none.kept == none.temporaries == 0.0
    assert none.parameters == both.parameters


def test_frozen_parts_have_no_gradients_and_no_moments():
    s = dataclasses.replace(segment(NANO.modules["llm"]), trainable=frozenset())
    got = segment_bytes(s, [], 1)
    assert got.gradients == got.optimizer == 0.0
    assert got.parameters > 0
