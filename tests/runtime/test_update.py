"""Reduction, clipping and update on a mesh equal the same steps by hand on the host."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflop_jax.runtime import shards
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import grad_structs, param_specs, param_structs
from dflop_jax.runtime.update import SegmentUpdate
from models.llava import build
from tests.small import Small

from . import plain

MODEL, NANO = Small(), build("nano")
RATE, MOMENTUM = 0.1, 0.5
WIDE = ((0, 1, 2, 2), (0, 2, 2, 2), 2)  # vision, llm (first, stage, data, model), group size
SMALL = ((0, 1, 1, 1), (1, 1, 2, 1), 1)


def updates_of(meshes, clip_norm, freeze=(), model=MODEL):
    vision, llm, group_size = meshes
    plan = plain.plan_of(model, vision, llm, group_size=group_size)
    segments = make_segments(model, plan.layout, jax.devices(), freeze=freeze)
    tx = optax.sgd(RATE, MOMENTUM)
    updates = {n: SegmentUpdate(s, tx, clip_norm) for n, s in segments.items()}
    return {n: u for n, u in updates.items() if u.segment.trainable}


def start(update):
    """(host parameters, the trainable ones on their mesh) of a segment."""
    s = update.segment
    rng = np.random.default_rng(3)
    host = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), param_structs(s))
    free = {p: host[p] for p in host if p in s.trainable}
    specs = {p: spec for p, spec in param_specs(s).items() if p in free}
    return host, jax.tree.map(lambda a, spec: shard_array(a, s.sharding(*spec)), free, specs)


def random_grads(update, rng, scale):
    """The ranks' gradients on the host, as the backward programs leave them."""
    return jax.tree.map(
        lambda a: (scale * rng.normal(size=a.shape)).astype(np.float32),
        grad_structs(update.segment),
    )


NO_LIMIT = np.asarray(np.finfo(np.float32).max)


def run_steps(updates, grads_of_steps, limits=None):
    """Steps of the compiled programs, under limits of the squared norm; (parameters, state) of
    every step by segment, on the host, and the norms."""
    params = {n: start(u)[1] for n, u in updates.items()}
    state = {n: u.init_state(params[n])[2] for n, u in updates.items()}
    reduce = {n: u.lower_reduce().compile() for n, u in updates.items()}
    update = {n: u.lower_update(len(updates)).compile() for n, u in updates.items()}
    norms, shards, after = [], {}, []
    for host, most in zip(grads_of_steps, limits or [NO_LIMIT] * len(grads_of_steps), strict=True):
        squares = {}
        for n, u in updates.items():
            placed = jax.tree.map(
                lambda g, s: shard_array(g, s.sharding), host[n], grad_structs(u.segment)
            )
            shards[n], squares[n], zeroed = reduce[n](placed, {})
            assert not any(np.any(g) for g in jax.tree.leaves(zeroed))
            want = [s.sharding for s in jax.tree.leaves(grad_structs(u.segment))]
            assert [g.sharding for g in jax.tree.leaves(zeroed)] == want
        for n, u in updates.items():
            here = tuple(jax.device_put(q, u.segment.sharding()) for q in squares.values())
            limit = shard_array(np.asarray(most, np.float32), u.segment.sharding())
            params[n], _, state[n], total = update[n](
                params[n], {}, state[n], shards[n], here, limit
            )
            norms.append(float(np.sqrt(total)))
        after.append(jax.tree.map(np.array, (params, state)))
    return after, norms


def steps_by_hand(updates, grads_of_steps, clip_norm):
    """(parameters by segment, norms) of the same steps with one tree on the host."""
    params = {n: {p: start(u)[0][p] for p in u.segment.trainable} for n, u in updates.items()}
    momentum, norms = jax.tree.map(np.zeros_like, params), []
    for host in grads_of_steps:
        grads = jax.tree.map(lambda g: g.sum(axis=0), host)
        norms.append(np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads))))
        factor = min(1.0, clip_norm / norms[-1]) if clip_norm else 1.0
        momentum = jax.tree.map(lambda m, g, f=factor: MOMENTUM * m + f * g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - RATE * m, params, momentum)
    return params, norms


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    "meshes, clip_norm, freeze, together",
    [
        (WIDE, 1.0, (), shards.MAX_FUSED_ELEMENTS),
        (WIDE, 1.0, (), 1000),
        (SMALL, 0.0, (), shards.MAX_FUSED_ELEMENTS),
        (SMALL, 1e6, ("vision",), 1),
    ],
    ids=["wide, clipped", "in parts", "small, unclipped", "frozen vision, below the norm, alone"],
)
def test_two_steps_equal_those_by_hand_and_skipped_ones_change_nothing(
    monkeypatch, meshes, clip_norm, freeze, together
):
    monkeypatch.setattr(shards, "MAX_FUSED_ELEMENTS", together)
    updates = updates_of(meshes, clip_norm, freeze)
    rng = np.random.default_rng(0)
    scales = {"vision": 0.1, "llm": 1.0}  # unlike norms: clipping one alone would differ
    steps = [{n: random_grads(u, rng, scales[n]) for n, u in updates.items()} for _ in range(2)]
    want, want_norms = steps_by_hand(updates, steps, clip_norm)
    bad = {n: random_grads(u, rng, scales[n]) for n, u in updates.items()}
    jax.tree.leaves(bad["llm"])[0].flat[-1] = np.nan
    over = {n: random_grads(u, rng, scales[n]) for n, u in updates.items()}
    jax.tree.leaves(over["llm"])[-1].flat[0] = np.inf
    steps_of_run = [steps[0], bad, over, steps[0], steps[1]]
    limits = [NO_LIMIT, NO_LIMIT, NO_LIMIT, 0.99 * want_norms[0] ** 2, 1.01 * want_norms[1] ** 2]
    after, norms = run_steps(updates, steps_of_run, limits)
    # What is not finite, and what is too large, leaves everything as it was: to the bit.
    for skipped in (1, 2, 3):
        jax.tree.map(np.testing.assert_array_equal, after[skipped], after[0])
    ways = len(updates)
    assert not np.isfinite(norms[ways : 3 * ways]).any()
    norms = [*norms[:ways], *norms[-ways:]]
    got, _ = after[-1]
    # Every segment sees the same norm, that of all segments.
    np.testing.assert_allclose(np.reshape(norms, (2, -1)).T, [want_norms] * ways, 1e-5)
    if clip_norm == 1.0:
        assert min(norms) > 10
    for n in updates:
        assert set(got[n]) == set(updates[n].segment.trainable)
        for (path, w), g in zip(
            jax.tree_util.tree_leaves_with_path(want[n]), jax.tree.leaves(got[n]), strict=True
        ):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6, err_msg=str(path))


COLLECTIVE = re.compile(r"= \S+ (all-reduce|reduce-scatter|all-gather|all-to-all)(-start)?\(")


@pytest.mark.parametrize("together, most", [(shards.MAX_FUSED_ELEMENTS, 4), (1, 100)])
def test_parameters_travel_together(monkeypatch, together, most):
    """Collectives of a program: gradients of the ends over stages and over data, the norm; back."""
    monkeypatch.setattr(shards, "MAX_FUSED_ELEMENTS", together)
    updates = updates_of(((0, 1, 4, 1), (0, 2, 2, 1), 2), 1.0, (), NANO)
    for u in updates.values():
        for lowered in (u.lower_reduce(), u.lower_update(2)):
            count = len(COLLECTIVE.findall(lowered.compile().as_text()))
            assert 1 <= count <= most
            assert together > 1 or count > 8


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_sent_of_new_parameters_is_in_the_working_dtype(zero):
    """Nothing is where every rank keeps its piece; what they become: `test_optimizers`."""
    half = dataclasses.replace(NANO, dtype=jnp.dtype(jnp.bfloat16))
    plan = plain.with_zero(plain.plan_of(half, *SMALL[:2]), llm=zero)
    segment = make_segments(half, plan.layout, jax.devices())["llm"]
    update = SegmentUpdate(segment, optax.sgd(2.0**-12), 0.0)
    lowered = update.lower_update(1)
    sent = {"bf16": 0, "f32": 0}
    for shape, kind in re.findall(
        r'"stablehlo.all_gather".*?: \(tensor<([\dx]*)x(\w+)>\)', lowered.as_text(), re.DOTALL
    ):
        sent[kind] += int(np.prod([int(n) for n in shape.split("x")])) * segment.data_ranks
    n_elements = sum(a.size for a in jax.tree.leaves(update.master_structs))
    assert sent == {"bf16": n_elements if zero == 1 else 0, "f32": 0}
    assert n_elements > 10_000
