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
from dflop_jax.generate.decoding import Cache, inlet_layers
from dflop_jax.generate.mesh import DATA, MODEL, spec_of
from dflop_jax.generate.row import LLM, AnswerRows, add_features, round_up_to_bucket
from dflop_jax.generate.sampling import Sampling, SamplingArgs, sample_tokens

Tree = Any
TOKEN_MULTIPLE = 128  # of a row's tokens and slots, the least; else twice, four times ... as many
# Tokens of an answer that slots are made for at once. Answers that may be longer get more slots as
# they grow, which compiles once for each number of them.
ANSWER_TOKENS = 128


class BatchState(NamedTuple):
    """What a batch keeps of its rows' tokens: what layers keep, and which tokens there are."""

    cache: Cache
    present_BV: Any


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
        state = BatchState(
            Cache({k: P(None, DATA) for k in dict.fromkeys(layer_kinds_of(llm))}, rows), rows
        )
        outs = state, rows
        self.start = self._compiled(
            partial(start_answers, model, chip), (every, rows, rows, every), outs
        )
        self.step = self._compiled(
            partial(decode_step, llm), (every, *outs, every), outs, donated=(1,)
        )
        self.grow = self._compiled(partial(grow_slots, llm), outs, outs)
        self._shardings = partial(_shardings, llm, mesh)

    def tokens(
        self, params: dict[str, Params], rows: AnswerRows, number: np.ndarray, sampling: Sampling
    ) -> Iterator[np.ndarray]:
        """Yield the next token of every row, int32 [rows], up to `sampling.max_tokens` times.

        Args:
          params: by module, as `mesh.param_structs` says.
          number: uint32 [rows], of each answer among all that are drawn.
        """
        put = partial(jax.device_put, device=NamedSharding(self._mesh, P(DATA)))
        draw = SamplingArgs.from_sampling(sampling)
        longest = int(rows.lengths.max())
        slots = round_up_to_bucket(
            longest + min(sampling.max_tokens, ANSWER_TOKENS), TOKEN_MULTIPLE
        )
        state, newest = self.start(params, put(rows), put(number), draw, slots=slots)
        for n in range(1, sampling.max_tokens):
            tokens = newest.token_B
            if longest + n > slots:
                slots *= 2
                state, newest = self.grow(state, newest, slots=slots)
            # It runs while the host looks at the tokens before it.
            state, newest = self.step(params, state, newest, draw)
            yield np.asarray(tokens)
        yield np.asarray(newest.token_B)

    def _compiled(self, function: Any, ins: Tree, outs: Tree, donated: tuple[int, ...] = ()) -> Any:
        """The function on every data rank; XLA splits what the devices of one share."""

        def whole(*args: Any, **fixed: Any) -> Any:
            mapped: Any = jax.shard_map(
                partial(function, **fixed), mesh=self._mesh, in_specs=ins, out_specs=outs,
                axis_names={DATA}, check_vma=False,
            )  # fmt: skip
            results = mapped(*args)
            return jax.lax.with_sharding_constraint(results, self._shardings(results))

        return jax.jit(whole, static_argnames=("slots",), donate_argnums=donated)


def _shardings(
    llm: GeneratingModule, mesh: Mesh, results: tuple[BatchState, NewestTokens]
) -> tuple[Tree, Tree]:
    """Of what a program gives: rows over data ranks, and heads of what layers keep over the devices
    of one."""
    tp = int(mesh.shape[MODEL])

    def cache_sharding(a: Array, axes: tuple[str | None, ...]) -> Any:
        _, *split = spec_of(a.shape[1:], axes, tp)
        return NamedSharding(mesh, P(None, DATA, *split))

    state, _ = results
    rows = NamedSharding(mesh, P(DATA))
    state_shardings, newest_shardings = jax.tree.map(lambda _: rows, results)
    by_kind = {
        kind: jax.tree.map(cache_sharding, tree, llm.memory(kind).axes)
        for kind, tree in state.cache.by_kind.items()
    }
    return state_shardings._replace(
        cache=state_shardings.cache._replace(by_kind=by_kind)
    ), newest_shardings


def start_answers(
    model: MultimodalModel,
    chip: str,
    params: dict[str, Params],
    rows: AnswerRows,
    number_B: Array,
    draw: SamplingArgs,
    *,
    slots: int,
) -> tuple[BatchState, NewestTokens]:
    """Run prompts, and draw the first token of each answer."""
    llm: Any = on_chip(model.modules[LLM], chip)
    last_B = jnp.maximum(rows.lengths - 1, 0)
    batch = add_features(model, chip, params, rows)
    logits_BV, cache = decoding.prefill(llm, params[LLM], batch, last_B, slots, inlet_layers(model))
    B, V = logits_BV.shape
    tokens_BT = batch["tokens"]
    known_BT = jnp.arange(tokens_BT.shape[1])[None] <= last_B[:, None]
    present_BV = _mark_present(jnp.zeros((B, V), bool), jnp.where(known_BT, tokens_BT, V))
    nth_B = jnp.zeros_like(last_B)
    token_B = sample_tokens(draw, logits_BV, present_BV, number_B, nth_B)
    present_BV = _mark_present(present_BV, token_B[:, None])
    return BatchState(cache, present_BV), NewestTokens(token_B, last_B + 1, number_B, nth_B + 1)


def decode_step(
    llm: GeneratingModule,
    params: dict[str, Params],
    state: BatchState,
    newest: NewestTokens,
    draw: SamplingArgs,
) -> tuple[BatchState, NewestTokens]:
    """Run the newest token of each row, and draw the one after it."""
    logits_BV, cache = decoding.decode(
        llm, params[LLM], state.cache, newest.token_B, newest.place_B
    )
    token_B = sample_tokens(draw, logits_BV, state.present_BV, newest.number_B, newest.nth_B)
    present_BV = _mark_present(state.present_BV, token_B[:, None])
    return BatchState(cache, present_BV), NewestTokens(
        token_B, newest.place_B + 1, newest.number_B, newest.nth_B + 1
    )


def grow_slots(
    llm: GeneratingModule, state: BatchState, newest: NewestTokens, *, slots: int
) -> tuple[BatchState, NewestTokens]:
    """The same, with room for rows of `slots` tokens."""
    return state._replace(cache=decoding.grow_cache(llm, state.cache, slots)), newest


def _mark_present(present_BV: Array, tokens_BT: Array) -> Array:
    """`present_BV` with these tokens; one that is beyond the vocabulary is none."""
    rows = jnp.arange(len(present_BV))[:, None]
    return present_BV.at[rows, tokens_BT].set(True, mode="drop")
