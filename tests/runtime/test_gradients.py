"""One step's loss and every gradient equal the plain computation, whatever the plan.

Every layout runs a small model; those that a real model's layers could mind run "nano" too.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from dflop_jax.plan.space import baseline_layouts
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import param_zero_specs, state_zero_specs
from models.llava import build
from tests.small import Small

from . import plain

N = 12
KEY_BIAS = "['vision']['layers']['key']['bias']"


NANO = build("nano")


@functools.cache
def oracle(m):
    """(samples, modules' parameters, loss, gradients) of a model, computed plainly."""
    samples = plain.random_samples(m, N, 1)
    plan = plain.plan_of(m, (0, 1, 1, 1), (1, 1, 1, 1))
    params = plain.fresh_params(m, plan)
    return samples, params, *plain.plain_loss_and_grads(m, params, samples)


def grads_of(m, plan, samples, schedule, *, change=lambda ex: None, draws="", scales=None,
             **kwargs):  # fmt: skip
    """(loss, gradients as the reduction gives them, parameters, result) of one step; `change` is
    made to the initial state. With `scales` of their losses, samples are those of the data layer,
    and an evaluation gives the same sums if the executor `evaluates`."""
    ex = Executor(m, plan, optax.sgd(1.0), **kwargs)
    try:
        ex.init(0)
        change(ex)
        segments = ex.programs.segments.items()
        held, split = (
            {n: of(s) for n, s in segments} for of in (param_zero_specs, state_zero_specs)
        )
        params = plain.join(plan, ex.state.params, held)
        ex.compile()
        if scales is None:
            arrays = plain.pack(m, plan, schedule, samples, draws)
            scales = plain.scales_of(arrays)
        else:
            arrays = plain.really_packed(m, plan, schedule, samples)
        captured = keep_reduced(ex, ex.trainable, np.asarray)
        evaluates = kwargs.get("evaluates")
        evaluated = ex.run_evaluation(schedule, arrays).result().sums if evaluates else None
        result = ex.run_step(schedule, arrays, scales).result()
        assert evaluated is None or evaluated == pytest.approx(result.sums, rel=1e-5)
        return (
            sum(result.sums[f"{name}.loss_sum"] * scale for name, scale in scales.items()),
            plain.join(plan, captured, split),
            params,
            result,
        )
    finally:
        ex.close()


def keep_reduced(ex, segments, read=lambda leaf: leaf):
    """What the reduction gives of these segments' gradients, once a step has run."""
    captured: dict = {}
    for n in segments:

        def spy(grads, more, n=n, program=ex.programs.compiled[n, "reduce"]):
            out = program(grads, more)
            own = ex.programs.segments[n].owned_parts
            captured[n] = jax.tree.map(read, {p: t for p, t in out[0].items() if p in own})
            return out

        ex.programs.compiled[n, "reduce"] = spy
    return captured


def assert_trees_close(got, want, tolerance=1e-5):
    """Per leaf, relative to its largest entry.

    The vision key bias has no gradient in exact arithmetic (softmax ignores a shift), so both
    sides hold rounding noise there: it only has to be negligible.
    """
    flat = jax.tree_util.tree_leaves_with_path(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    largest = max((np.abs(w).max() for _, w in flat), default=0)
    for (path, w), g in zip(flat, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        if name == KEY_BIAS:
            assert max(np.abs(w).max(), np.abs(g).max()) <= 1e-6 * largest
        else:
            assert np.abs(g - w).max() <= tolerance * np.abs(w).max(), name


def check_step(m, plan, *, schedule=None, seed=1, n_groups=2, text_only=(0,), freeze=(),
               tolerance=1e-5):  # fmt: skip
    """A step of a plan gives the plain loss, and of what trains the plain gradients; returns these
    and the result."""
    samples, params, want_loss, want = oracle(m)
    if schedule is None:
        schedule = plain.random_schedule(plan, samples, n_groups, seed, text_only=text_only)
    loss, grads, start, result = grads_of(m, plan, samples, schedule, freeze=freeze)
    assert_trees_close(start, params, 1e-6)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_trees_close(grads, trained(m, want, freeze), tolerance)
    return grads, result


def trained(m, params, freeze):
    """By module, the parts that are not frozen."""
    return {
        name: {p: t for p, t in parts.items() if m.modules[name].freeze_groups[p] not in freeze}
        for name, parts in params.items()
    }


def assert_norm(result, grads):
    squares = sum(np.square(g).sum() for g in jax.tree.leaves(grads))
    assert result.grad_norm == pytest.approx(np.sqrt(squares), rel=1e-5)


# name -> (vision (first, stage, data, model), llm, options)
PLANS = {
    "2+6, tp 2 and dp 3 x tp 2": ((0, 1, 1, 2), (2, 1, 3, 2), {}),
    "4+4, dp 4 and tp 2 x dp 2": ((0, 1, 4, 1), (4, 1, 2, 2), {}),
    "llm stage 2, dp 2, tp 2 on 8, shared": (
        (0, 1, 8, 1),
        (0, 2, 2, 2),
        {"group_size": 2, "rounds": 2},
    ),
    "4+4, tp 2 x dp 2 and dp 4": ((0, 1, 2, 2), (4, 1, 4, 1), {}),
    "llm stage 2": ((0, 1, 2, 1), (2, 2, 1, 1), {"group_size": 2}),
    "llm stage 4, twice as many": ((0, 1, 1, 2), (2, 4, 1, 1), {"group_size": 8}),
    "vision stage 2, 4 times as many": ((0, 2, 2, 1), (4, 1, 2, 1), {"group_size": 8}),
    "llm as 3 segments": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 3}),
    "llm as 3 segments, untied": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 3, "tied": False}),
    "tied across segments of dp 2 x tp 2": ((0, 1, 2, 1), (0, 1, 2, 2), {"llm_segments": 2}),
    "three groups feed one": ((0, 1, 2, 1), (2, 1, 2, 1), {"fan_in": 3}),
    "two groups of stage 2 read one": (
        (0, 1, 2, 1),
        (2, 2, 1, 1),
        {"group_size": 2, "fan_in": 2, "divided_readers": ("llm",)},
    ),
    "two groups feed one, stage 2": (
        (0, 1, 2, 1),
        (2, 2, 1, 1),
        {"group_size": 4, "fan_in": 2, "rounds": 2},
    ),
    "same mesh": ((0, 1, 4, 2), (0, 1, 4, 2), {}),
    "same devices, other shape": ((0, 1, 8, 1), (0, 1, 2, 2), {}),
    "one device": ((0, 1, 1, 1), (0, 1, 1, 1), {}),
    "gpipe": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 2, "order": "gpipe"}),
    "rows": ((0, 1, 2, 1), (2, 1, 2, 1), {"rows": 2}),
    "3+5, dp 3 and 5": ((0, 1, 3, 1), (3, 1, 5, 1), {}),
    "dp 7 and 6, shared": ((0, 1, 7, 1), (0, 1, 6, 1), {}),
    "dp 5, llm stage 2 of dp 3": ((0, 1, 5, 1), (0, 2, 3, 1), {"group_size": 2}),
    "blocks of dp 6 and 2 x tp 2": ((0, 1, 6, 1), (0, 1, 4, 2), {}),
    "blocks of dp 6, llm stage 2 of dp 4": (
        (0, 1, 6, 1),
        (0, 2, 4, 1),
        {"group_size": 2, "rounds": 2},
    ),
}


# What some of them split over data ranks: of 3, 5, 6 and 7 ranks most parameters are held flat.
ZERO = {
    "2+6, tp 2 and dp 3 x tp 2": {"llm": 3},
    "3+5, dp 3 and 5": {"vision": 3, "llm": 2},
    "dp 7 and 6, shared": {"vision": 1, "llm": 3},
    "dp 5, llm stage 2 of dp 3": {"vision": 3, "llm": 3},
    # Blocks of two, two and three data ranks.
    "blocks of dp 6 and 2 x tp 2": {"vision": (1, 2), "llm": (3, 4)},
    "blocks of dp 6, llm stage 2 of dp 4": {"vision": (3, 3), "llm": (2, 2)},
    "4+4, dp 4 and tp 2 x dp 2": {"vision": 3, "llm": 2},
    "llm stage 2, dp 2, tp 2 on 8, shared": {"vision": 2, "llm": 3},
    "tied across segments of dp 2 x tp 2": {"vision": 2, "llm": 3},
    "same mesh": {"vision": 3, "llm": 3},
    "rows": {"vision": 1, "llm": 2},
}


ON_NANO = ("2+6, tp 2 and dp 3 x tp 2", "llm stage 2, dp 2, tp 2 on 8, shared")


def planned(case, m=None):
    """(a model, the small one if none is given, a plan for it)."""
    vision, llm, options = case
    options = dict(options)
    sizes = {k: options.pop(k) for k in ("tied", "n_layers") if k in options}
    m = m or Small(**sizes)
    return m, plain.plan_of(m, vision, llm, bucket=(36, 240), **options)


@pytest.mark.slow(first=3)
@pytest.mark.parametrize(
    "size, name", [*(("small", name) for name in PLANS), *(("nano", name) for name in ON_NANO)]
)
def test_step_equals_plain_computation(size, name):
    m, plan = planned(PLANS[name], None if size == "small" else NANO)
    check_step(m, plain.with_zero(plan, **ZERO.get(name, {})), seed=len(name))


def test_a_stage_of_two_modules_equals_plain_computation():
    """As the policy `pytorch` deals layers: the last of the encoder and the first of the LLM."""
    m = Small(tied=False)
    space = baseline_layouts("pytorch", 4, {"vision": 2, "llm": 4}, max_model=1, max_stage=2)
    placement = next(p for p in space if len(p.submeshes) == 2)
    assert [s.submesh for s in placement.segments] == ["vision+llm0", "vision+llm0", "llm1"]
    plan = plain.plan_of(m, (0, 1, 2, 1), (2, 1, 2, 1), bucket=(36, 240))
    check_step(m, plan.with_layout(submeshes=placement.submeshes, segments=placement.segments))


@pytest.mark.slow
def test_bfloat16_step_is_close():
    """Under tensor parallelism, data parallelism and stages at once."""
    samples, _, want_loss, want = oracle(NANO)
    half = dataclasses.replace(NANO, dtype=jax.numpy.dtype("bfloat16"))
    plan = plain.plan_of(half, (0, 1, 1, 2), (0, 2, 2, 2), group_size=2, bucket=(36, 240))
    schedule = plain.random_schedule(plan, samples, 2, seed=3, text_only=(0,))
    loss, grads, _, _ = grads_of(half, plan, samples, schedule)
    assert loss == pytest.approx(want_loss, rel=1e-2)
    for got, exact in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert got.dtype == np.float32  # accumulated in float32
        if np.abs(exact).max() > 1e-3:
            assert np.abs(got - exact).max() < 0.1 * np.abs(exact).max()


FROZEN = {
    ("vision",): {"vision": {"exit"}, "llm": {"entry", "layers", "exit"}},
    ("vision", "llm"): {"vision": {"exit"}, "llm": set()},
    ("llm",): {"vision": {"entry", "layers", "exit"}, "llm": set()},
    ("vision", "connector"): {"vision": set(), "llm": {"entry", "layers", "exit"}},
}


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("freeze", FROZEN)
def test_frozen_parts_keep_the_others_gradients(freeze):
    m = Small()
    plan = plain.plan_of(m, (0, 1, 2, 1), (2, 1, 2, 1), bucket=(36, 240))
    grads, result = check_step(m, plan, freeze=freeze)
    assert {module: set(parts) for module, parts in grads.items()} == FROZEN[freeze]
    # A frozen encoder with a frozen connector runs no backward at all.
    vision_ran = {e.direction for e in result.trace.events if e.segment == "vision"}
    assert ("backward" in vision_ran) == bool(FROZEN[freeze]["vision"])


def test_everything_frozen_is_refused():
    plan = plain.plan_of(Small(), (0, 1, 1, 1), (1, 1, 1, 1))
    with pytest.raises(ValueError, match="nothing is left to train"):
        Executor(Small(), plan, optax.sgd(1.0), freeze=("vision", "connector", "llm"))
    with pytest.raises(ValueError, match="cannot freeze"):
        Executor(Small(), plan, optax.sgd(1.0), freeze=("audio",))


def test_text_only_plan_without_encoder():
    m = Small()
    samples = plain.random_samples(m, 6, 5, max_tiles=0)
    plan = plain.plan_of(m, None, (0, 1, 2, 1), bucket=(0, 96))
    schedule = plain.random_schedule(plan, samples, 2, seed=0)
    loss, grads, params, _ = grads_of(m, plan, samples, schedule)
    want_loss, want = plain.plain_loss_and_grads(m, params, samples)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_trees_close(grads["llm"], want["llm"])
