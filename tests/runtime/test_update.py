"""Reduction, clipping and update on a mesh against the same steps on the host, and every optimizer
on shards against optax on one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.runtime import shards
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import (
    grad_structs,
    initial_structs,
    initial_zero_specs,
    param_structs,
)
from dflop_jax.runtime.update import SegmentUpdate
from dflop_jax.train.optimizer import make_optimizer
from models.composed import Composition
from models.llava import build
from tests.small import Small, Text

from . import plain

NANO = build("nano")
NO_LIMIT = np.float32(np.finfo(np.float32).max)


def updates_of(model, plan, tx, *arguments, freeze=()):
    segments = make_segments(model, plan.layout, jax.devices(), freeze=freeze)
    return {n: SegmentUpdate(s, tx, *arguments) for n, s in segments.items() if s.trainable}


def random_like(structs, rng, scale):
    return jax.tree.map(lambda a: (scale * rng.normal(size=a.shape)).astype(np.float32), structs)


def owned_params(update, rng):
    structs = param_structs(update.segment)
    return random_like({p: structs[p] for p in update.segment.owned_parts}, rng, 0.3)


def put(tree, specs, structs):
    """Host arrays by part on the segment's devices."""
    return {
        p: jax.tree.map(
            lambda a, spec, s: shard_array(spec.to_stored(a).astype(s.dtype), s.sharding),
            tree[p], specs[p], structs[p],
        )
        for p in structs
    }  # fmt: skip


def start(update, params):
    """`init_state` of host parameters."""
    s = update.segment
    return update.init_state(put(params, initial_zero_specs(s), initial_structs(s)))


# ---- reduction, clipping, skipped steps ----

RATE, MOMENTUM = 0.1, 0.5
WIDE = ((0, 1, 2, 2), (0, 2, 2, 2), 2)  # vision, llm (first, stage, data, model), group size
APART = ((0, 1, 1, 1), (1, 1, 2, 1), 1)


def run_steps(updates, params, grads_of_steps, limits):
    """Steps of the compiled programs, under limits of the squared norm; (parameters, state) of
    every step by segment, on the host, and the norms."""
    state = {n: list(start(u, params[n])) for n, u in updates.items()}
    reduce = {n: u.lower_reduce().compile() for n, u in updates.items()}
    update = {n: u.lower_update(len(updates)).compile() for n, u in updates.items()}
    norms, reduced, after = [], {}, []
    for host, limit in zip(grads_of_steps, limits, strict=True):
        squares = {}
        for n, u in updates.items():
            structs = grad_structs(u.segment)
            placed = jax.tree.map(lambda g, s: shard_array(g, s.sharding), host[n], structs)
            reduced[n], squares[n], zeroed = reduce[n](placed, {})
            assert not any(np.any(g) for g in jax.tree.leaves(zeroed))
            assert jax.tree.all(
                jax.tree.map(lambda g, s: g.sharding == s.sharding, zeroed, structs)
            )
        for n, u in updates.items():
            here = u.segment.sharding()
            total = tuple(jax.device_put(q, here) for q in squares.values())
            held = {p: state[n][0][p] for p in u.segment.trainable}
            args = held, *state[n][1:], reduced[n], total, shard_array(np.float32(limit), here)
            *state[n], square = update[n](*args)
            norms.append(float(np.sqrt(square)))
        after.append(jax.tree.map(np.array, state))
    return after, norms


def steps_by_hand(params, grads_of_steps, clip_norm):
    """(parameters by segment, norms) of the same steps with one tree on the host."""
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
    "meshes, clip_norm, freeze, fused",
    [(WIDE, 1.0, (), 1000), (WIDE, 1.0, (), shards.MAX_FUSED_ELEMENTS),
     (APART, 1e6, ("vision",), 1)],
    ids=["wide, clipped, in parts", "wide, clipped", "frozen vision, below the norm, alone"],
)  # fmt: skip
def test_two_steps_equal_those_by_hand_and_skipped_ones_change_nothing(
    monkeypatch, meshes, clip_norm, freeze, fused
):
    monkeypatch.setattr(shards, "MAX_FUSED_ELEMENTS", fused)
    vision, llm, group_size = meshes
    plan = plain.plan_of(Small(), vision, llm, group_size=group_size)
    updates = updates_of(Small(), plan, optax.sgd(RATE, MOMENTUM), clip_norm, freeze=freeze)
    rng = np.random.default_rng(0)
    scales = {"vision": 0.1, "llm": 1.0}  # unlike norms: clipping one alone would differ
    params = {n: owned_params(u, rng) for n, u in updates.items()}

    def gradients():
        return {n: random_like(grad_structs(u.segment), rng, scales[n]) for n, u in updates.items()}

    first, second, bad, over = (gradients() for _ in range(4))
    trained = {n: {p: params[n][p] for p in first[n]} for n in updates}
    want, (norm, next_norm) = steps_by_hand(trained, [first, second], clip_norm)
    jax.tree.leaves(bad["llm"])[0].flat[-1] = np.nan
    jax.tree.leaves(over["llm"])[-1].flat[0] = np.inf
    limits = [NO_LIMIT, NO_LIMIT, NO_LIMIT, 0.99 * norm**2, 1.01 * next_norm**2]
    after, norms = run_steps(updates, params, [first, bad, over, first, second], limits)
    # What is not finite, and what is too large, leaves everything as it was: to the bit.
    for skipped in (1, 2, 3):
        jax.tree.map(np.testing.assert_array_equal, after[skipped], after[0])
    # Every segment sees the same norm, that of all segments.
    by_step = np.reshape(norms, (5, -1))
    assert not np.isfinite(by_step[1:3]).any()
    for found, expected in ((by_step[0], norm), (by_step[-1], next_norm)):
        np.testing.assert_allclose(found, expected, 1e-5)
        assert clip_norm > 1 or expected > 10
    got = {n: after[-1][n][0] for n in updates}
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


COLLECTIVE = re.compile(r"= \S+ (all-reduce|reduce-scatter|all-gather|all-to-all)(-start)?\(")


def test_parameters_travel_together():
    """Collectives of a program: gradients of the ends over stages and over data, the norm; back."""
    plan = plain.plan_of(NANO, (0, 1, 4, 1), (0, 2, 2, 1), group_size=2)
    for u in updates_of(NANO, plan, optax.sgd(RATE), 1.0).values():
        for lowered in (u.lower_reduce(), u.lower_update(2)):
            assert 1 <= len(COLLECTIVE.findall(lowered.compile().as_text())) <= 4


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_sent_of_new_parameters_is_in_the_working_dtype(zero):
    """Nothing is where every rank keeps its piece."""
    half = dataclasses.replace(NANO, dtype=jnp.dtype(jnp.bfloat16))
    plan = plain.with_zero(plain.plan_of(half, *APART[:2]), llm=zero)
    update = updates_of(half, plan, optax.sgd(2.0**-12), 0.0)["llm"]
    gathered = r'"stablehlo.all_gather".*?: \(tensor<([\dx]*)x(\w+)>\)'
    sent = {"bf16": 0, "f32": 0}
    for shape, kind in re.findall(gathered, update.lower_update(1).as_text(), re.DOTALL):
        n_ranks = update.segment.data_ranks
        sent[kind] += int(np.prod([int(n) for n in shape.split("x")])) * n_ranks
    n_elements = sum(a.size for a in jax.tree.leaves(update.master_structs))
    assert sent == {"bf16": n_elements if zero == 1 else 0, "f32": 0}
    assert n_elements > 10_000


# ---- optimizers ----

CONFIG = TrainConfig(
    steps=20, warmup_steps=0, schedule="constant", learning_rate=1e-2, weight_decay=0.1,
    weight_decays=("connector=0.3",),
)  # fmt: skip
DECAY = {"vision": 0.1, "connector": 0.3, "llm": 0.1}
FACTORS = {"connector": 3.0, "llm": 0.5}  # of the rate that the optimizer has


def flat_by_path(segment, trees):
    """Flat dict (part, *path) -> array of a segment's own parts, layers stacked."""
    leaves = jax.tree_util.tree_leaves_with_path({p: trees[p] for p in segment.owned_parts})
    return {tuple(k.key for k in path): np.asarray(leaf) for path, leaf in leaves}


def optax_steps(name, segment, params, grads_of_steps):
    """Steps of optax's own optimizer of flat dicts."""
    undecayed = {"bias", "scale", *getattr(segment.module, "float32_names", ())}
    decays = {
        k: v.ndim - (k[0] == "layers") > 1 and k[-1] not in undecayed for k, v in params.items()
    }
    groups = segment.module.freeze_groups
    made = {
        g: getattr(optax, name)(
            FACTORS.get(g, 1.0) * CONFIG.learning_rate, CONFIG.beta1, CONFIG.beta2,
            weight_decay=DECAY[g], mask=lambda p: {k: decays[k] for k in p},
        )
        for g in groups.values()
    }  # fmt: skip
    tx = optax.partition(made, {k: groups[k[0]] for k in params})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = {k: jnp.asarray(v) for k, v in params.items()}
        state = tx.init(params)

        @jax.jit
        def one(g, state, params):
            steps, state = tx.update(g, state, params)
            return optax.apply_updates(params, steps), state

        for g in grads_of_steps:
            params, state = one(g, state, params)
    return jax.tree.map(np.asarray, params)


def sharded_steps(update, params, grads_of_steps):
    """The same by the compiled update: (parameters that programs read, masters, state)."""
    compiled, here = update.lower_update(1).compile(), update.segment.sharding()
    held, masters, state = start(update, params)
    limit, square = shard_array(NO_LIMIT, here), shard_array(np.float32(1), here)
    structs = update._owned_trained(update.shard_structs)
    for g in grads_of_steps:
        pieces = put(g, update._zero_specs, structs)
        held, masters, state, _ = compiled(held, masters, state, pieces, (square,), limit)
    return held, masters, state


def check_copies(segment, held, masters):
    """What programs read is the masters in the working dtype, or as they are."""
    named = getattr(segment.module, "float32_names", ())
    for path, master in jax.tree_util.tree_leaves_with_path(masters):
        part, name = path[0].key, path[-1].key
        leaf = held[part][name]
        assert leaf.dtype == (jnp.float32 if name in named else jnp.bfloat16)
        if segment.plan.zero < 3:
            master = plain.whole_of(initial_zero_specs(segment)[part][name], master)
        np.testing.assert_array_equal(leaf, np.asarray(master).astype(leaf.dtype))


def check(m, plan, name):
    rng, tx = np.random.default_rng(0), make_optimizer(dataclasses.replace(CONFIG, optimizer=name))
    for update in updates_of(m, plan, tx, 0.0, FACTORS).values():
        s, params = update.segment, owned_params(update, rng)
        grads = [random_like(params, rng, 0.1) for _ in range(5)]
        flat = flat_by_path(s, params)
        want = optax_steps(name, s, flat, [flat_by_path(s, g) for g in grads])
        held, masters, state = sharded_steps(update, params, grads)
        check_copies(s, held, masters)
        held, specs = masters or held, initial_zero_specs(s)
        got = flat_by_path(s, {p: jax.tree.map(plain.whole_of, specs[p], held[p]) for p in held})
        assert got.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-6, atol=1e-6, err_msg=str(key))
        leaves = zip(jax.tree.leaves(state), jax.tree.leaves(update.state_structs), strict=True)
        for leaf, struct in leaves:
            assert (leaf.shape, leaf.dtype) == (struct.shape, struct.dtype)
            assert leaf.sharding == struct.sharding


ON_THREE, ALONE = (0, 1, 3, 1), (7, 1, 1, 1)
# (first, stage, data, model) of the tower and of the LLM, ZeRO degree and block of the LLM, what
# else of the plan.
LAYOUTS = {
    "orch: all on three ranks, ZeRO 3": (ON_THREE, ON_THREE, (3, 0), {}),
    "dflop: two stages in rounds, ZeRO 1": (
        ALONE, (0, 2, 2, 1), (1, 0), {"rounds": 2, "group_size": 2},
    ),
    "dflop: two blocks of three, ZeRO 2": (ALONE, (0, 1, 6, 1), (2, 3), {}),
    "dip: two segments beside the tower, ZeRO 2": (
        ON_THREE, ON_THREE, (2, 0), {"llm_segments": 2},
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HalfText(Text):
    """Works in bfloat16, but for a matrix and a vector, which do not decay."""

    working_dtype = jnp.bfloat16
    float32_names = ("up", "bias")

    def entry(self, params, batch):
        return super().entry(in_float32(params), batch)

    def layer(self, params, x, batch):
        return super().layer(in_float32(params), x, batch)

    def exit(self, params, x, batch, entry):
        return super().exit(in_float32(params), x, batch, entry and in_float32(entry))


def in_float32(params):
    return jax.tree.map(lambda a: a.astype(jnp.float32), params)


@dataclasses.dataclass(frozen=True)
class Half(Small):
    @property
    def modules(self):
        return {**super().modules, "llm": HalfText(self.n_layers, self.tied)}


# Every optimizer under every layout; each of them meets both models twice.
CASES = [
    (name, layout, (Small(), Half())[(i + j) % 2])
    for i, name in enumerate(("adamw", "lion"))
    for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.slow(first=4)
@pytest.mark.parametrize(
    "name, layout, m", CASES, ids=[f"{n}, {k}, {type(m).__name__}" for n, k, m in CASES]
)
def test_steps_equal_optax(name, layout, m):
    tower, llm, degree, more = LAYOUTS[layout]
    check(m, plain.with_zero(plain.plan_of(m, tower, llm, **more), llm=degree), name)


@pytest.mark.slow
def test_steps_equal_optax_where_heads_are_split():
    """Three data ranks hold pieces of what two tensor ranks split."""
    decoder = dataclasses.replace(NANO.size.decoder, n_layers=2)
    vision = dataclasses.replace(NANO.size.vision, n_layers=1)
    size = dataclasses.replace(NANO.size, decoder=decoder, vision=vision)
    heads = Composition(size, jnp.dtype("float32"))
    plan = plain.plan_of(heads, (0, 1, 2, 1), (2, 1, 3, 2))
    check(heads, plain.with_zero(plan, vision=2, llm=3), "adamw")
