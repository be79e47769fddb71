"""Two foreign modules of some twenty lines, a Linen encoder and an NNX LLM, train unchanged."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dflop_jax.runtime.executor import Executor

from . import plain

WIDTH, VOCAB, PX = 8, 32, 4


@dataclass(frozen=True)
class LinenEncoder:
    """Dense layers over the pixels of a tile, one token a tile."""

    n_layers = 2
    tied = False
    inputs = {"entry": ("pixels",), "layers": (), "exit": ()}
    freeze_groups = {"entry": "vision", "layers": "vision", "exit": "connector"}

    def field_spec(self, name, rows, tokens):
        return jax.ShapeDtypeStruct((rows, PX, PX, 3), jnp.uint8)

    def init(self, part, key):
        width_in = PX * PX * 3 if part == "entry" else WIDTH
        return nn.Dense(WIDTH).init(key, jnp.zeros((1, 1, width_in)))["params"]

    def logical_axes(self, part):
        return {"kernel": (None, None), "bias": (None,)}

    def entry(self, params, batch):
        pixels = batch["pixels"].astype(jnp.float32) / 255
        return nn.Dense(WIDTH).apply({"params": params}, pixels.reshape(len(pixels), 1, -1))

    def layer(self, params, x, batch):
        return x + jnp.tanh(nn.Dense(WIDTH).apply({"params": params}, x))

    def exit(self, params, x, batch, entry):
        return nn.Dense(WIDTH).apply({"params": params}, x)


class Mixer(nnx.Module):
    """A layer that looks at the token before, within its sample only."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, segment_ids):
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        same = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1] == segment_ids
        return x + jnp.tanh(self.lin(jnp.where(same[..., None], before, jnp.zeros_like(x))))


@dataclass(frozen=True)
class NnxDecoder:
    """An NNX model adapted by split and merge: the engine only sees a pytree."""

    n_layers = 2
    tied = False
    inputs = {
        "entry": ("tokens", "is_visual", "visual"),
        "layers": ("segment_ids",),
        "exit": ("targets", "weights"),
    }
    freeze_groups = dict.fromkeys(("entry", "layers", "exit"), "llm")

    def field_spec(self, name, rows, tokens):
        if name == "visual":
            return jax.ShapeDtypeStruct((rows, tokens, WIDTH), jnp.float32)
        kinds = {"weights": jnp.float32, "is_visual": jnp.bool_}
        return jax.ShapeDtypeStruct((rows, tokens), kinds.get(name, jnp.int32))

    def module(self, part, key):
        rngs = nnx.Rngs(key)
        if part == "layers":
            return Mixer(rngs)
        return (
            nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            if part == "entry"
            else nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        )

    def init(self, part, key):
        return nnx.to_pure_dict(nnx.state(self.module(part, key)))

    def apply(self, part, params, *args):
        graph, state = nnx.split(nnx.eval_shape(lambda: self.module(part, jax.random.key(0))))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(*args)

    def logical_axes(self, part):
        shapes = jax.eval_shape(lambda k: self.init(part, k), jax.random.key(0))
        return jax.tree.map(lambda a: (None,) * a.ndim, shapes)

    def entry(self, params, batch):
        x = self.apply("entry", params, batch["tokens"])
        return jnp.where(batch["is_visual"][..., None], batch["visual"], x)

    def layer(self, params, x, batch):
        return self.apply("layers", params, x, batch["segment_ids"])

    def exit(self, params, x, batch, entry):
        logits = self.apply("exit", params, x)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return {"loss_sum": jnp.sum(nll * batch["weights"])}


@dataclass(frozen=True)
class ForeignModel:
    modules = {"vision": LinenEncoder(), "llm": NnxDecoder()}
    vocab_size = VOCAB
    edges = ({"source": "vision", "target": "llm", "name": "visual"},)
    piece_tokens = {"vision": 1}
    preprocessing = {"vision": {"tile_px": PX, "tokens_per_tile": 1}}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("stages", [1, 2])
def test_foreign_modules_train(stages):
    model = ForeignModel()
    samples = plain.random_samples(model, 8, 0, text=12)
    plan = plain.plan_of(model, (0, 1, 2, 1), (2, stages, 2, 1), group_size=stages, bucket=(12, 64))
    schedule = plain.random_schedule(plan, samples, 1, 0, text_only=(0,))
    arrays = plain.pack(model, plan, schedule, samples)
    scales = plain.scales_of(arrays)
    ex = Executor(model, plan, optax.adam(3e-2))
    try:
        ex.init(0)
        ex.compile()
        before = plain.join(plan, ex.state.params)
        losses = [
            ex.run_step(schedule, arrays, scales).result().sums["llm.loss_sum"] * scales["llm"]
            for _ in range(12)
        ]
    finally:
        ex.close()
    assert losses[0] == pytest.approx(
        plain.plain_loss_and_grads(model, before, samples)[0], rel=1e-5
    )
    assert losses[-1] < 0.7 * losses[0]
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), before, plain.join(plan, ex.state.params)
    )
    assert min(jax.tree.leaves(moved)) > 0  # every parameter of both modules learned
