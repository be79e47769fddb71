"""Adapted models with adapters that act, and what to compare them with."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import param_zero_specs
from models.llava import build

from ..runtime import plain

RANK, ALPHA = 3, 6.0
DROPOUT, DRAWS = 0.3, "7/5"
N = 8
KEY = jax.random.key(0)
FREEZE = ("llm",)
# The tower and its ends too, by ranks of their own.
EVERYWHERE = {
    "targets": ("llm.*", "vis*", "connector.out"),
    "ranks": (("vision", 2), ("vision.up", 5), ("*.out", 1)),
}
ALL_FROZEN = ("vision", "connector", "llm")


@functools.cache
def base(dtype: str = "float32"):
    nano = build("nano", dtype)
    decoder = dataclasses.replace(nano.size.decoder, tied=False)
    return dataclasses.replace(nano, size=dataclasses.replace(nano.size, decoder=decoder))


@functools.cache
def adapted(dtype: str = "float32", *, everywhere: bool = False, dropout: float = 0.0):
    settings = EVERYWHERE if everywhere else {}
    return base(dtype).with_lora(RANK, ALPHA, dropout=dropout, **settings)


def let_act(ex) -> None:
    """Random B instead of zeros, the same whatever the plan."""
    for name, s in ex.programs.segments.items():
        for part in (p for p in s.owned_parts if "adapter" in p):
            rng = np.random.default_rng(5)
            lead = (s.module.n_layers,) if part in s.stacked else ()
            rows = list(s.layer_rows.get(part, ()))
            cuts = param_zero_specs(s)[part]
            structs = jax.eval_shape(partial(s.module.init, part), KEY)
            for name_, pair in ex.state.params[name][part].items():
                whole = rng.normal(size=(*lead, *structs[name_]["b"].shape)) * 0.05
                mine = jnp.asarray(whole[rows] if lead else whole, jnp.float32)
                pair["b"] = shard_array(cuts[name_]["b"].to_stored(mine), pair["b"].sharding)


@dataclasses.dataclass(frozen=True)
class Folded:
    """A module without adapters whose weights are folded here."""

    module: object

    def __getattr__(self, name):
        return getattr(self.module, name)

    def entry(self, params, batch):
        return self.module.entry(fold(params), batch)

    def layer(self, params, x, batch):
        return self.module.layer(fold(params), x, batch)

    def exit(self, params, x, batch, entry=None):
        return self.module.exit(fold(params), x, batch, entry)


def fold(params):
    own = {k: v for k, v in params.items() if k != "adapter"}
    for name, pair in params.get("adapter", {}).items():
        rank = pair["a"].shape[-1]
        product = jnp.einsum(
            "ir,ro->io",
            pair["a"].reshape(-1, rank),
            pair["b"].reshape(rank, -1),
            precision="highest",
        )
        kernel = own[name]["kernel"]
        scaled = ALPHA / rank * product.reshape(kernel.shape)
        own[name] = {**own[name], "kernel": kernel + scaled}
    return own


@dataclasses.dataclass(frozen=True)
class FoldedModel:
    modules: dict


@functools.cache
def samples():
    return plain.random_samples(base(), N, 1, max_tiles=1)  # two shapes for the oracle to compile


@functools.cache
def initial_params():
    m = adapted(everywhere=True)
    plan = plain.plan_of(m, (0, 1, 1, 1), (0, 1, 1, 1))
    ex = Executor(m, plan, optax.sgd(1.0), freeze=ALL_FROZEN)
    ex.init(0)
    let_act(ex)
    params = plain.join(plan, ex.state.params)
    ex.close()
    return params


@functools.cache
def oracle():
    """(initial parameters, loss and gradients of folded weights, loss without adapters)."""
    params, modules = initial_params(), base().modules
    folded = FoldedModel({name: Folded(module) for name, module in modules.items()})
    loss, grads = plain.plain_loss_and_grads(folded, params, samples())
    # By the same programs, which take seconds to compile.
    silent = {
        name: {p: jax.tree.map(np.zeros_like, t) if "adapter" in p else t for p, t in tree.items()}
        for name, tree in params.items()
    }
    without, _ = plain.plain_loss_and_grads(folded, silent, samples())
    return params, loss, grads, without


@functools.cache
def dropped_oracle():
    """(loss, gradients) of adapters everywhere that do not see all, sample by sample."""
    params, m = initial_params(), adapted(everywhere=True, dropout=DROPOUT)
    return plain.plain_loss_and_grads(m, params, samples(), DRAWS)


def n_bytes(structs) -> int:
    """Of arrays or their structs."""
    return sum(
        int(np.prod(a.shape)) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(structs)
    )


def with_adapters(model, params, seed):
    """The parameters with random adapters that act."""
    rng = np.random.default_rng(seed)

    def drawn(shape):
        return (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)

    out = {}
    for name, module in model.modules.items():
        out[name] = dict(params[name])
        for adapter, part in getattr(module, "adapters", {}).items():
            lead = (module.n_layers,) if part == "layers" else ()
            shapes = module.init(adapter, jnp.zeros(2, jnp.uint32))
            out[name][adapter] = {
                m: {side: drawn((*lead, *a.shape)) for side, a in pair.items()}
                for m, pair in shapes.items()
            }
    return out
