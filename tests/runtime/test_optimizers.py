"""Every optimizer on shards against optax on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import initial_structs, initial_zero_specs, param_structs
from dflop_jax.runtime.update import SegmentUpdate
from dflop_jax.train.optimizer import make_optimizer
from models.composed import Composition
from models.llava import build

from ..small import Small, Text
from . import plain

STEPS = 5
CONFIG = TrainConfig(
    steps=20, warmup_steps=0, schedule="constant", learning_rate=1e-2, weight_decay=0.1,
    weight_decays=("connector=0.3",),
)  # fmt: skip
SIZE = build("nano").size
HEADS = Composition(
    dataclasses.replace(
        SIZE,
        decoder=dataclasses.replace(SIZE.decoder, n_layers=2),
        vision=dataclasses.replace(SIZE.vision, n_layers=1),
    ),
    jnp.dtype("float32"),
)
DECAY = {"vision": 0.1, "connector": 0.3, "llm": 0.1}
FACTORS = {"connector": 3.0, "llm": 0.5}  # of the rate that the optimizer has


def updates_of(m, plan, name):
    segments = make_segments(m, plan.layout, jax.devices())
    tx = make_optimizer(dataclasses.replace(CONFIG, optimizer=name))
    return {n: SegmentUpdate(s, tx, 0.0, FACTORS) for n, s in segments.items()}


def random_like(structs, rng, scale):
    return jax.tree.map(lambda a: (scale * rng.normal(size=a.shape)).astype(np.float32), structs)


def put(update, tree, structs):
    """Host arrays by part on the segment's devices."""
    cuts = initial_zero_specs(update.segment) if structs is None else update._zero_specs
    structs = structs or initial_structs(update.segment)
    return {
        p: jax.tree.map(
            lambda a, cut, s: shard_array(cut.to_stored(a), s.sharding),
            tree[p],
            cuts[p],
            structs[p],
        )
        for p in structs
    }


def flat_by_path(segment, trees):
    """Flat dict (part, *path) -> array of a segment's own parts, layers stacked."""
    leaves = jax.tree_util.tree_leaves_with_path({p: trees[p] for p in segment.owned_parts})
    return {tuple(k.key for k in path): np.asarray(leaf) for path, leaf in leaves}


def oracle(name, segment, params):
    """Optax's own optimizer of a flat dict."""
    undecayed = {"bias", "scale", *getattr(segment.module, "float32_names", ())}
    rate, b1, b2 = CONFIG.learning_rate, CONFIG.beta1, CONFIG.beta2
    shrinks = {
        k: v.ndim - (k[0] == "layers") > 1 and k[-1] not in undecayed for k, v in params.items()
    }
    groups = segment.module.freeze_groups
    made = {
        g: getattr(optax, name)(
            FACTORS.get(g, 1.0) * rate,
            b1,
            b2,
            weight_decay=DECAY[g],
            mask=lambda p: {k: shrinks[k] for k in p},
        )
        for g in groups.values()
    }
    return optax.partition(made, {k: groups[k[0]] for k in params})


def plain_steps(name, update, params, grads_of_steps):
    s = update.segment
    flat = flat_by_path(s, params)
    return run(oracle(name, s, flat), flat, [flat_by_path(s, g) for g in grads_of_steps])


def run(tx, params, grads):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = {k: jnp.asarray(v) for k, v in params.items()}
        state = tx.init(params)

        @jax.jit
        def one(g, state, params):
            steps, state = tx.update(g, state, params)
            return optax.apply_updates(params, steps), state

        for g in grads:
            params, state = one(g, state, params)
    return jax.tree.map(np.asarray, params)


def sharded_steps(update, params, grads_of_steps):
    """The same by the compiled update; returns parameters as they are held, masters if there are
    any, and the state."""
    compiled = update.lower_update(1).compile()
    held, masters, state = update.init_state(put(update, params, None))
    limit = shard_array(np.float32(np.finfo(np.float32).max), update.segment.sharding())
    square = shard_array(np.float32(1), update.segment.sharding())
    for g in grads_of_steps:
        pieces = put(update, g, update._owned_trained(update.shard_structs))
        held, masters, state, _ = compiled(held, masters, state, pieces, (square,), limit)
    return held, masters, state


def check_copies(segment, held, masters):
    """What programs hold is the masters in the working dtype, or as they are."""
    named = getattr(segment.module, "float32_names", ())
    whole = segment.plan.zero < 3
    for path, master in jax.tree_util.tree_leaves_with_path(masters):
        leaf = held[path[0].key][path[-1].key]
        assert leaf.dtype == (jnp.float32 if path[-1].key in named else jnp.bfloat16)
        if whole:
            cut = initial_zero_specs(segment)[path[0].key][path[-1].key]
            master = plain.whole_of(cut, master)
        np.testing.assert_array_equal(leaf, np.asarray(master).astype(leaf.dtype))


def check(m, plan, name):
    rng = np.random.default_rng(0)
    for update in updates_of(m, plan, name).values():
        structs = {p: param_structs(update.segment)[p] for p in update.segment.owned_parts}
        params = random_like(structs, rng, 0.3)
        grads = [random_like(structs, rng, 0.1) for _ in range(STEPS)]
        want = plain_steps(name, update, params, grads)
        held, masters, state = sharded_steps(update, params, grads)
        check_copies(update.segment, held, masters)
        held, cuts = masters or held, initial_zero_specs(update.segment)
        got = {p: jax.tree.map(lambda c, a: plain.whole_of(c, a), cuts[p], held[p]) for p in held}
        got = flat_by_path(update.segment, got)
        assert got.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-6, atol=1e-6, err_msg=str(key))
        for leaf, struct in zip(
            jax.tree.leaves(state), jax.tree.leaves(update.state_structs), strict=True
        ):
            assert (leaf.shape, leaf.dtype) == (struct.shape, struct.dtype)
            assert leaf.sharding == struct.sharding


NAMES = ["adamw", "lion"]
APART = (7, 1, 1, 1)
ON_THREE = (0, 1, 3, 1)
# (first, stage, data, model) of the tower and of the LLM, ZeRO degree and block of the LLM, what
# else of the plan.
LAYOUTS = {
    "orch: all on three ranks, ZeRO 3": (ON_THREE, ON_THREE, (3, 0), {}),
    "dflop: two stages in rounds, ZeRO 1": (
        APART, (0, 2, 2, 1), (1, 0), {"rounds": 2, "group_size": 2},
    ),
    "dflop: two blocks of three, ZeRO 2": (APART, (0, 1, 6, 1), (2, 3), {}),
    "dip: two segments beside the tower, ZeRO 2": (
        ON_THREE, ON_THREE, (2, 0), {"llm_segments": 2},
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HalfText(Text):
    """Works in bfloat16, but for a matrix and a vector."""

    working_dtype = jnp.bfloat16
    float32_names = ("up", "bias")


@dataclasses.dataclass(frozen=True)
class Half(Small):
    @property
    def modules(self):
        return {**super().modules, "llm": HalfText(self.n_layers, self.tied)}


# Every optimizer under every layout; each of them meets both models twice.
CASES = [
    (name, layout, (Small(), Half())[(i + j) % 2])
    for i, name in enumerate(NAMES)
    for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.slow(first=4)
@pytest.mark.parametrize(
    "name, layout, m", CASES, ids=[f"{n}, {k}, {type(m).__name__}" for n, k, m in CASES]
)
def test_steps_equal_optax(name, layout, m):
    """Of the second model some parameters stay float32 and do not decay."""
    tower, llm, degree, more = LAYOUTS[layout]
    plan = plain.plan_of(m, tower, llm, **more)
    check(m, plain.with_zero(plan, llm=degree), name)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_optax_where_heads_are_split(name):
    """Three data ranks hold pieces of what two tensor ranks split."""
    plan = plain.plan_of(HEADS, (0, 1, 2, 1), (2, 1, 3, 2))
    check(HEADS, plain.with_zero(plan, vision=2, llm=3), name)
