"""The compiled programs that answer: one begins a batch of rows, one adds a token to each, one
makes room for more.

Shape suffixes: B rows, T tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import (
    Array,
    MultimodalModel,
    Params,
    chip_of,
    layer_kinds_of,
    on_chip,
)
from dflop_jax.generate import decoding
from dflop_jax.generate.contract import GeneratingModule
from dflop_jax.generate.decoding import Cache, inlets_of
from dflop_jax.generate.mesh import DATA, MODEL, spec_of
from dflop_jax.generate.row import LLM, AnswerRows, bucket_of, with_features
from dflop_jax.generate.sampling import Draw, Sampling, next_tokens

Tree = Any
TOKEN_MULTIPLE = 128  # of a row's tokens and slots, the least; else twice, four times ... as many
# Tokens of an answer that slots are made for at once. Answers that may be longer get more slots as
# they grow, which compiles once for each number of them.
ANSWER_TOKENS = 128


class HeldTokens(NamedTuple):
    """What a batch keeps of its rows' tokens: what layers keep, and which tokens there are."""

    cache: Cache
    said_BV: Any


class NewestTokens(NamedTuple):
    """The newest token of each row: its id, its place in the row, the answer's number among all
    that are drawn, and the tokens of the answer up to it."""

    token_B: Any
    place_B: Any
    number_B: Any
    nth_B: Any


class AnswerPrograms:
    """Those of a model on the devices of a mesh (see `answer_mesh`).

    Raises:
      ValueError: the model's LLM does not generate.
    """

    def __init__(self, model: MultimodalModel, mesh: Mesh):
        chip = chip_of(mesh.devices.flat[0])
        llm: Any = on_chip(model.modules[LLM], chip)
        if not hasattr(llm, "memory") or not hasattr(llm, "logits"):
            raise ValueError(
                "the model's llm has no memory and logits "
                "(dflop_jax.generate.contract.GeneratingModule); add them, or take another model"
            )
        self._mesh = mesh
        rows: Any = P(DATA)
        every = P()
        held = HeldTokens(
            Cache({k: P(None, DATA) for k in dict.fromkeys(layer_kinds_of(llm))}, rows), rows
        )
        outs = held, rows
        self.begin = self._compiled(partial(begin, model, chip), (every, rows, rows, every), outs)
        self.go_on = self._compiled(partial(go_on, llm), (every, *outs, every), outs, donated=(1,))
        self.grow = self._compiled(partial(grow, llm), outs, outs)
        self._shardings = partial(_shardings, llm, mesh)

    def tokens(
        self, params: dict[str, Params], rows: AnswerRows, number: np.ndarray, how: Sampling
    ) -> Iterator[np.ndarray]:
        """Yield the next token of every row, int32 [rows], up to `how.max_tokens` times.

        Args:
          params: by module, as `mesh.param_structs` says.
          number: uint32 [rows], of each answer among all that are drawn.
        """
        put, draw = partial(jax.device_put, device=NamedSharding(self._mesh, P(DATA))), Draw.of(how)
        longest = int(rows.lengths.max())
        slots = bucket_of(longest + min(how.max_tokens, ANSWER_TOKENS), TOKEN_MULTIPLE)
        held, at = self.begin(params, put(rows), put(number), draw, slots=slots)
        for n in range(1, how.max_tokens):
            tokens = at.token_B
            if longest + n > slots:
                slots *= 2
                held, at = self.grow(held, at, slots=slots)
            # It runs while the host looks at the tokens before it.
            held, at = self.go_on(params, held, at, draw)
            yield np.asarray(tokens)
        yield np.asarray(at.token_B)

    def _compiled(self, function: Any, ins: Tree, outs: Tree, donated: tuple[int, ...] = ()) -> Any:
        """The function on every data rank; XLA splits what the devices of one share."""

        def whole(*args: Any, **fixed: Any) -> Any:
            mapped: Any = jax.shard_map(
                partial(function, **fixed), mesh=self._mesh, in_specs=ins, out_specs=outs,
                axis_names={DATA}, check_vma=False,
            )  # fmt: skip
            made = mapped(*args)
            return jax.lax.with_sharding_constraint(made, self._shardings(made))

        return jax.jit(whole, static_argnames=("slots",), donate_argnums=donated)


def _shardings(
    llm: GeneratingModule, mesh: Mesh, made: tuple[HeldTokens, NewestTokens]
) -> tuple[Tree, Tree]:
    """Of what a program gives: rows over data ranks, and heads of what layers keep over the devices
    of one."""
    tp = int(mesh.shape[MODEL])

    def kept(a: Array, axes: tuple[str | None, ...]) -> Any:
        _, *split = spec_of(a.shape[1:], axes, tp)
        return NamedSharding(mesh, P(None, DATA, *split))

    held, _ = made
    rows = NamedSharding(mesh, P(DATA))
    of_held, of_newest = jax.tree.map(lambda _: rows, made)
    by_kind = {
        kind: jax.tree.map(kept, tree, llm.memory(kind).axes)
        for kind, tree in held.cache.kept.items()
    }
    return of_held._replace(cache=of_held.cache._replace(kept=by_kind)), of_newest


def begin(
    model: MultimodalModel,
    chip: str,
    params: dict[str, Params],
    rows: AnswerRows,
    number_B: Array,
    draw: Draw,
    *,
    slots: int,
) -> tuple[HeldTokens, NewestTokens]:
    """Run prompts, and draw the first token of each answer."""
    llm: Any = on_chip(model.modules[LLM], chip)
    last_B = jnp.maximum(rows.lengths - 1, 0)
    batch = with_features(model, chip, params, rows)
    logits_BV, cache = decoding.prefill(llm, params[LLM], batch, last_B, slots, inlets_of(model))
    B, V = logits_BV.shape
    tokens_BT = batch["tokens"]
    known_BT = jnp.arange(tokens_BT.shape[1])[None] <= last_B[:, None]
    said_BV = _with_tokens(jnp.zeros((B, V), bool), jnp.where(known_BT, tokens_BT, V))
    nth_B = jnp.zeros_like(last_B)
    token_B = next_tokens(draw, logits_BV, said_BV, number_B, nth_B)
    said_BV = _with_tokens(said_BV, token_B[:, None])
    return HeldTokens(cache, said_BV), NewestTokens(token_B, last_B + 1, number_B, nth_B + 1)


def go_on(
    llm: GeneratingModule, params: dict[str, Params], held: HeldTokens, at: NewestTokens, draw: Draw
) -> tuple[HeldTokens, NewestTokens]:
    """Run the newest token of each row, and draw the one after it."""
    logits_BV, cache = decoding.decode(llm, params[LLM], held.cache, at.token_B, at.place_B)
    token_B = next_tokens(draw, logits_BV, held.said_BV, at.number_B, at.nth_B)
    said_BV = _with_tokens(held.said_BV, token_B[:, None])
    return HeldTokens(cache, said_BV), NewestTokens(
        token_B, at.place_B + 1, at.number_B, at.nth_B + 1
    )


def grow(
    llm: GeneratingModule, held: HeldTokens, at: NewestTokens, *, slots: int
) -> tuple[HeldTokens, NewestTokens]:
    """The same, with room for rows of `slots` tokens."""
    return held._replace(cache=decoding.grown(llm, held.cache, slots)), at


def _with_tokens(said_BV: Array, tokens_BT: Array) -> Array:
    """`said_BV` with these tokens; one that is beyond the vocabulary is none."""
    rows = jnp.arange(len(said_BV))[:, None]
    return said_BV.at[rows, tokens_BT].set(True, mode="drop")
