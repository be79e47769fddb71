"""Decoding one token at a time, in static shapes: each layer keeps of the tokens so far what the
memory of its kind says.

`prefill` runs the prompts, padded to one length; `decode` adds one token to each row.

Shape suffixes: B rows, T tokens, V vocab.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dflop_jax.contract import (
    Array,
    Module,
    MultimodalModel,
    Params,
    edges_of,
    layer_kinds_of,
    with_adapter,
)
from dflop_jax.generate.row import LLM, NO_CACHES, Mix, run_layers


class Memory(Protocol):
    """What layers of one kind keep of their rows' tokens so far, so that one more token of each row
    runs alone: keys and values, a window of them, a recurrent state. A layer mixes its tokens in
    one call of one function (its attention), which gets `*args, **options` below."""

    @property
    def axes(self) -> Any:
        """The tree that one layer keeps, a tuple of logical axis names per array; "rows" is one."""
        ...

    def prefill(self, last: Array, slots: int, *args: Any, **options: Any) -> tuple[Array, Any]:
        """Mix the tokens of whole prompts, one per row, as in training; returns what the layer's
        own function returns, and what the memory keeps.

        Args:
          last: int32 [rows], index of each prompt's last token; what follows it is padding, of
            segment 0, that nothing may be kept of.
          slots: tokens that a row may come to, its prompt among them.
        """
        ...

    def decode_token(
        self, cache: Any, layer: Array, place: Array, *args: Any, **options: Any
    ) -> tuple[Array, Any]:
        """Mix one more token of each row, [rows, 1, ...], with those before it; returns the same as
        `prefill`, with the cache of all layers, that of this one brought up to date. A row's token
        may be run again at its place, as long as none follows.

        Args:
          cache: of all layers of this kind, stacked.
          layer: int32 scalar, which of them this is.
          place: int32 [rows], the token's place in its row.
        """
        ...

    def grow(self, cache: Any, slots: int) -> Any:
        """The cache with room for rows of `slots` tokens, more than it had."""
        ...


class GeneratingModule(Module, Protocol):
    """An LLM that also answers. Its `layer` takes, by name, `mix`: the function that mixes its
    tokens in the place of its own, called once and as its own is."""

    def memory(self, kind: str) -> Memory:
        """What layers of a kind keep."""
        ...

    def logits(self, params: Params, x: Array, entry: Params) -> Array:
        """Float32 [rows, tokens, vocab] of hidden states; `entry` has the parameters of its
        entry."""
        ...


class Cache(NamedTuple):
    """What the layers keep of the tokens so far."""

    by_kind: dict[str, Any]  # layers stacked
    # Position of a further token less its place in its row; of pictures they may differ.
    position_offset_B: Array


def inlet_layers(model: MultimodalModel) -> dict[str, int]:
    """Edges that the LLM reads between its layers: field -> layers that have run there."""
    return {e.name: e.enters for e in edges_of(model) if e.target == LLM and e.enters >= 0}


def prefill(
    module: GeneratingModule,
    params: Params,
    batch: Mapping[str, Array],
    last_B: Array,
    slots: int,
    inlets: Mapping[str, int],
) -> tuple[Array, Cache]:
    """Run one prompt per row; returns float32 logits [B, V] of what follows them, and the cache.

    Args:
      params: all of the module's, layers stacked.
      batch: fields of its entry, layers and inlets, [B, T]; positions count from 0.
      last_B: int, index of each prompt's last token; what follows it is padding.
      slots: tokens that prompt and answer may take, at least T.
      inlets: see `inlet_layers`.
    """
    B, T = batch["tokens"].shape

    def mix(kind: str, _: Array, cache: None, *args: Any, **options: Any) -> tuple[Array, Any]:
        return module.memory(kind).prefill(last_B, slots, *args, **options)

    x_BTD, caches = run_decoder(module, params, batch, inlets, mix)
    position_offset_B = jnp.zeros_like(last_B)
    if "positions" in batch:
        known_BT1 = (jnp.arange(T)[None] <= last_B[:, None])[:, :, None]
        positions_BTA = batch["positions"].reshape(B, T, -1)
        position_offset_B = jnp.where(known_BT1, positions_BTA, 0).max(axis=(1, 2)) - last_B
    last_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    logits = module.logits(params["exit"], last_B1D, params["entry"])[:, 0]
    return logits, Cache(caches, position_offset_B)


def decode(
    module: GeneratingModule, params: Params, cache: Cache, tokens_B: Array, places_B: Array
) -> tuple[Array, Cache]:
    """Run the token at one place of each row; all before it have been run. Returns float32 logits
    [B, V] of what follows, and the cache with the tokens added; donate the cache, so that it is
    changed in place."""
    batch = _token_fields(module, tokens_B, places_B + cache.position_offset_B)

    def mix(kind: str, layer: Array, caches: Any, *args: Any, **options: Any) -> tuple[Array, Any]:
        return module.memory(kind).decode_token(caches, layer, places_B, *args, **options)

    x_BTD, caches = run_decoder(module, params, batch, {}, mix, cache.by_kind)
    logits = module.logits(params["exit"], x_BTD, params["entry"])[:, 0]
    return logits, Cache(caches, cache.position_offset_B)


def grow_cache(module: GeneratingModule, cache: Cache, slots: int) -> Cache:
    """The cache for rows of up to `slots` tokens, more than it was for."""
    grown = {kind: module.memory(kind).grow(a, slots) for kind, a in cache.by_kind.items()}
    return cache._replace(by_kind=grown)


def run_decoder(
    module: GeneratingModule,
    params: Params,
    batch: Mapping[str, Array],
    inlets: Mapping[str, int],
    mix: Mix | None = None,
    caches: Mapping[str, Any] = NO_CACHES,
) -> tuple[Array, dict[str, Any]]:
    """Hidden states [B, T, D] after all layers, and by kind what the layers keep, stacked.

    Args:
      inlets: see `inlet_layers`.
      mix: called as (kind, layer number, caches of the kind, *what the layer's function gets);
        None: layers mix tokens as in training, and nothing is kept.
      caches: by kind, of all layers, which `mix` updates; empty: `mix` makes that of one layer.
    """
    x_BTD, made = module.entry(with_adapter("entry", params), batch), defaultdict(list)
    for start, stop in pairwise(sorted({0, *inlets.values(), module.n_layers})):
        x_BTD, by_kind = run_layers(module, params, x_BTD, batch, start, stop, mix, caches)
        for kind, cache in by_kind.items():
            made[kind].append(cache)
        for name in (name for name, n in inlets.items() if n == stop):
            inlet: Any = module.inlet  # type: ignore[attr-defined]
            x_BTD = inlet(name, x_BTD, batch[name], batch)
    if caches:  # of a token, which no inlet reads
        return x_BTD, by_kind
    return x_BTD, {k: jax.tree.map(lambda *a: jnp.concatenate(a), *made[k]) for k in made}


def _token_fields(
    module: GeneratingModule, tokens_B: Array, positions_B: Array
) -> dict[str, Array]:
    """The fields of one further token of each row: text, alone in its segment."""
    (B,) = tokens_B.shape
    parts = ("entry", *dict.fromkeys(layer_kinds_of(module)))
    specs = {n: module.field_spec(n, B, 1) for part in parts for n in module.inputs[part]}
    batch = {name: jnp.zeros(s.shape, s.dtype) for name, s in specs.items()}
    batch["tokens"] = tokens_B[:, None]
    if "segment_ids" in specs:
        batch["segment_ids"] = jnp.ones((B, 1), jnp.int32)
    if "positions" in specs:
        shape = specs["positions"].shape
        positions = positions_B.reshape(B, *[1] * (len(shape) - 1))
        batch["positions"] = jnp.broadcast_to(positions, shape)
    return batch
