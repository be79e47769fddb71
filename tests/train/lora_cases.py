"""Adapted models with adapters that act, and what to compare them with."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.pipeline.communicator import place
from dflop_jax.pipeline.executor import Executor
from models.llava import build

from ..pipeline import plain

RANK, ALPHA = 3, 6.0
N = 8
FREEZE = ("llm",)


@functools.cache
def base(tied: bool = False, dtype: str = "float32"):
    nano = build("nano", dtype)
    decoder = dataclasses.replace(nano.size.decoder, tied=tied)
    return dataclasses.replace(nano, size=dataclasses.replace(nano.size, decoder=decoder))


@functools.cache
def adapted(tied: bool = False, dtype: str = "float32"):
    return base(tied, dtype).with_lora(RANK, ALPHA)


def let_act(ex) -> None:
    """Random B instead of zeros, the same whatever the plan."""
    for name, s in ex.programs.segments.items():
        if "adapter" not in s.parts:
            continue
        rng = np.random.default_rng(5)
        for pair in ex.state.params[name]["adapter"].values():
            whole = rng.normal(size=(s.module.n_layers, *pair["b"].shape[1:])) * 0.05
            mine = whole[s.plan.start : s.plan.stop].astype(np.float32)
            pair["b"] = place(mine, pair["b"].sharding)


@dataclasses.dataclass(frozen=True)
class Folded:
    """The LLM without adapters, its weights made of theirs: what `Linear` does is not used."""

    module: object

    def __getattr__(self, name):
        return getattr(self.module, name)

    def layer(self, params, x, batch):
        own = {k: v for k, v in params.items() if k != "adapter"}
        for name, pair in params["adapter"].items():
            product = jnp.einsum(
                "ir,ro->io",
                pair["a"].reshape(-1, RANK),
                pair["b"].reshape(RANK, -1),
                precision="highest",
            )
            kernel = own[name]["kernel"]
            own[name] = {**own[name], "kernel": kernel + 2.0 * product.reshape(kernel.shape)}
        return self.module.layer(own, x, batch)


@dataclasses.dataclass(frozen=True)
class FoldedModel:
    modules: dict


@functools.cache
def samples():
    return plain.random_samples(base(), N, 1, max_tiles=1)  # two shapes for the oracle to compile


@functools.cache
def oracle(tied: bool):
    """(initial parameters with acting adapters, loss and gradients of the folded weights, loss
    without the adapters), computed plainly."""
    m = adapted(tied)
    plan = plain.plan_of(m, (0, 1, 1, 1), (0, 1, 1, 1))
    ex = Executor(m, plan, optax.sgd(1.0), freeze=FREEZE)
    ex.init(0)
    let_act(ex)
    params = plain.join(plan, ex.state.params)
    ex.close()
    modules = base(tied).modules
    folded = FoldedModel({**modules, "llm": Folded(modules["llm"])})
    loss, grads = plain.plain_loss_and_grads(folded, params, samples())
    # By the same programs, which take seconds to compile.
    silent = jax.tree.map(np.zeros_like, params["llm"]["adapter"])
    llm = params["llm"] | {"adapter": silent}
    without, _ = plain.plain_loss_and_grads(folded, params | {"llm": llm}, samples())
    return params, loss, grads, without


def n_bytes(structs) -> int:
    """Of arrays or their structs."""
    return sum(
        int(np.prod(a.shape)) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(structs)
    )
