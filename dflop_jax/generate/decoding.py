"""Autoregressive decoding in static shapes; each kind of layer has its own kind of cache.

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
from dflop_jax.generate.row import LLM, NO_CACHES, TokenMixer, run_layers


class Memory(Protocol):
    """The cache of layers of one kind: keys and values, a window of them, or a recurrent state.

    A layer mixes its tokens in one call of one function (its attention). The methods replace that
    function and get its arguments as `*args, **options`."""

    @property
    def axes(self) -> Any:
        """The tree of one layer's cache, with a tuple of logical axis names (one is "rows") per
        array."""
        ...

    def prefill(self, last: Array, slots: int, *args: Any, **options: Any) -> tuple[Array, Any]:
        """Mix the tokens of complete prompts, one per row, as in training; return the result of the
        layer's own function, and the layer's cache.

        Args:
          last: int32 [rows], index of each prompt's last token; padding (segment 0) follows it and
            must not enter the cache.
          slots: maximum number of tokens in a row, prompt included.
        """
        ...

    def decode_token(
        self, cache: Any, layer: Array, place: Array, *args: Any, **options: Any
    ) -> tuple[Array, Any]:
        """Mix one more token of each row, [rows, 1, ...], with the tokens before it; return the
        result as `prefill` does, and the stacked cache in which this layer is updated. A call may
        repeat the newest token at the same place.

        Args:
          cache: the caches of all layers of this kind, stacked.
          layer: int32 scalar, the layer's index in `cache`.
          place: int32 [rows], the token's index in its row.
        """
        ...

    def grow(self, cache: Any, slots: int) -> Any:
        """Return the cache enlarged to `slots` tokens per row."""
        ...


class GeneratingModule(Module, Protocol):
    """An LLM that can generate. Its `layer` has a keyword argument `mix`, a function that replaces
    the layer's own token mixing; the layer calls it once, with the same arguments."""

    def memory(self, kind: str) -> Memory:
        """Return the cache type of a kind of layers."""
        ...

    def logits(self, params: Params, x: Array, entry: Params) -> Array:
        """Return float32 logits [rows, tokens, vocab] of hidden states; `params` are the exit's
        parameters and `entry` the entry's."""
        ...


class Cache(NamedTuple):
    """The caches of all layers, by kind of layer."""

    by_kind: dict[str, Any]  # layers stacked
    # A new token's position minus its index in the row; pictures may make it nonzero.
    position_offset_B: Array


def inlet_layers(model: MultimodalModel) -> dict[str, int]:
    """Return the edges that the LLM reads between layers: field -> number of layers before it."""
    return {e.name: e.enters for e in edges_of(model) if e.target == LLM and e.enters >= 0}


def prefill(
    module: GeneratingModule,
    params: Params,
    batch: Mapping[str, Array],
    last_B: Array,
    slots: int,
    inlets: Mapping[str, int],
) -> tuple[Array, Cache]:
    """Run one prompt per row; return float32 logits [B, V] of the next tokens, and the cache.

    Args:
      params: all parameters of the module, layers stacked.
      batch: fields of its entry, layers and inlets, [B, T]; positions count from 0.
      last_B: int, index of each prompt's last token; padding follows it.
      slots: maximum number of tokens of prompt and answer, at least T.
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
    """Run the token at index `places_B` of each row, after all tokens before it. Return float32
    logits [B, V] of the next tokens, and the cache with the tokens added; donate the cache to
    update it in place."""
    batch = _token_fields(module, tokens_B, places_B + cache.position_offset_B)

    def mix(kind: str, layer: Array, caches: Any, *args: Any, **options: Any) -> tuple[Array, Any]:
        return module.memory(kind).decode_token(caches, layer, places_B, *args, **options)

    x_BTD, caches = run_decoder(module, params, batch, {}, mix, cache.by_kind)
    logits = module.logits(params["exit"], x_BTD, params["entry"])[:, 0]
    return logits, Cache(caches, cache.position_offset_B)


def grow_cache(module: GeneratingModule, cache: Cache, slots: int) -> Cache:
    """Return the cache enlarged to `slots` tokens per row."""
    grown = {kind: module.memory(kind).grow(a, slots) for kind, a in cache.by_kind.items()}
    return cache._replace(by_kind=grown)


def run_decoder(
    module: GeneratingModule,
    params: Params,
    batch: Mapping[str, Array],
    inlets: Mapping[str, int],
    mix: TokenMixer | None = None,
    caches: Mapping[str, Any] = NO_CACHES,
) -> tuple[Array, dict[str, Any]]:
    """Return hidden states [B, T, D] after all layers, and the layers' stacked caches by kind.

    Args:
      inlets: see `inlet_layers`.
      mix: called as (kind, layer index, caches of the kind, *arguments of the layer's function);
        None: layers mix tokens as in training, without caches.
      caches: by kind, caches of all layers that `mix` updates; empty: `mix` makes each layer's.
    """
    x_BTD, made = module.entry(with_adapter("entry", params), batch), defaultdict(list)
    for start, stop in pairwise(sorted({0, *inlets.values(), module.n_layers})):
        x_BTD, by_kind = run_layers(module, params, x_BTD, batch, start, stop, mix, caches)
        for kind, cache in by_kind.items():
            made[kind].append(cache)
        for name in (name for name, n in inlets.items() if n == stop):
            inlet: Any = module.inlet  # type: ignore[attr-defined]
            x_BTD = inlet(name, x_BTD, batch[name], batch)
    if caches:  # a decoded token: no inlet has run, so the caches are those of all layers
        return x_BTD, by_kind
    return x_BTD, {k: jax.tree.map(lambda *a: jnp.concatenate(a), *made[k]) for k in made}


def _token_fields(
    module: GeneratingModule, tokens_B: Array, positions_B: Array
) -> dict[str, Array]:
    """Return the fields of one new text token of each row, alone in its segment."""
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
