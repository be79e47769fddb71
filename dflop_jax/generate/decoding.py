"""Decoding one token at a time, in static shapes: each layer keeps of the tokens so far what the
memory of its kind says.

`prefill` runs the prompts, padded to one length; `decode` adds one token to each row.

Shape suffixes: B rows, T tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflop_jax.contract import (
    Array,
    MultimodalModel,
    Params,
    edges_of,
    layer_kinds_of,
    layer_of,
    with_adapter,
)
from dflop_jax.generate.contract import GeneratingModule
from dflop_jax.generate.row import LLM, layer_loops


class Cache(NamedTuple):
    """What the layers keep of the tokens so far, by kind, layers stacked; and what to add to a
    further token's place in its row for its position: not 0 where a picture takes fewer or more
    positions than tokens."""

    by_kind: dict[str, Any]
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
    """Run one prompt per row.

    Args:
      params: all of the module's, layers stacked.
      batch: fields of its entry, layers and inlets, [B, T]; positions count from 0 from the first
        token on.
      last_B: int, index of each prompt's last token; what follows it is padding.
      slots: tokens that prompt and answer may take, at least T.
      inlets: see `inlet_layers`.

    Returns:
      float32 logits [B, V] of what follows the prompts, and the cache.
    """
    B, T = batch["tokens"].shape
    assert slots >= T, (slots, T)
    memories = _memories(module)

    def mix(kind: str, _: Array, cache: None, *args: Any, **options: Any) -> tuple[Array, Any]:
        return memories[kind].prefill(last_B, slots, *args, **options)

    x_BTD, caches = run_decoder(module, params, batch, {}, mix, inlets)
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
    """Run the token at one place of each row; all before it have been run.

    Returns:
      float32 logits [B, V] of what follows, and the cache with the tokens added. Donate the cache:
      it is then changed in place.
    """
    memories = _memories(module)
    batch = _token_fields(module, tokens_B, places_B + cache.position_offset_B)

    def mix(
        kind: str, layer: Array, layer_caches: Any, *args: Any, **options: Any
    ) -> tuple[Array, Any]:
        return memories[kind].decode_token(layer_caches, layer, places_B, *args, **options)

    x_BTD, caches = run_decoder(module, params, batch, cache.by_kind, mix, {})
    logits = module.logits(params["exit"], x_BTD, params["entry"])[:, 0]
    return logits, Cache(caches, cache.position_offset_B)


def grow_cache(module: GeneratingModule, cache: Cache, slots: int) -> Cache:
    """The cache for rows of up to `slots` tokens, more than it was for."""
    memories = _memories(module)
    return Cache(
        {k: memories[k].grow(a, slots) for k, a in cache.by_kind.items()}, cache.position_offset_B
    )


def _memories(module: GeneratingModule) -> dict[str, Any]:
    return {kind: module.memory(kind) for kind in dict.fromkeys(layer_kinds_of(module))}


def run_decoder(
    module: GeneratingModule,
    params: Params,
    batch: Mapping[str, Array],
    caches: Mapping[str, Any],
    mix: Callable[..., tuple[Array, Any]] | None,
    inlets: Mapping[str, int],
) -> tuple[Array, dict[str, Any]]:
    """Hidden states [B, T, D] after all layers, and by kind what the layers keep, stacked.

    Args:
      caches: by kind, of all layers, which `mix` updates; {}: `mix` makes that of one layer.
      mix: called as (kind, layer number, caches of the kind, *what the layer's function gets);
        None: layers mix tokens as in training, and nothing is kept.
      inlets: see `inlet_layers`.
    """
    x_BTD, by_kind = module.entry(with_adapter("entry", params), batch), dict(caches)
    made: dict[str, list[Any]] = {}
    for start, stop in pairwise(sorted({0, *inlets.values(), module.n_layers})):
        for loop, rows, period in layer_loops(module, params, start, stop):
            numbers = (jnp.arange(r.start, r.stop, r.step) for r in rows)
            run = partial(_run_period, module, loop.period, batch, mix)
            # Caches are carried, not scanned over, so that a layer writes one slot in place.
            (x_BTD, by_kind), stacks = jax.lax.scan(
                run, (x_BTD, by_kind), tuple(zip(numbers, period, strict=True))
            )
            for kind in dict.fromkeys(loop.period) if stacks else ():
                of_kind = [a for k, a in zip(loop.period, stacks, strict=True) if k == kind]
                made.setdefault(kind, []).append(jax.tree.map(_interleave, *of_kind))
        for name in (name for name, n in inlets.items() if n == stop):
            inlet: Any = module.inlet  # type: ignore[attr-defined]
            x_BTD = inlet(name, x_BTD, batch[name], batch)
    for kind, parts in made.items():
        by_kind[kind] = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return x_BTD, by_kind


def _run_period(
    module: GeneratingModule,
    kinds: Sequence[str],
    batch: Mapping[str, Array],
    mix: Callable[..., tuple[Array, Any]] | None,
    carry: tuple[Array, dict[str, Any]],
    layers: Sequence[tuple[Array, Params]],
) -> tuple[tuple[Array, dict[str, Any]], tuple[Any, ...]]:
    """Hidden states and caches after one layer of each kind, and the caches that they made."""
    x, caches, made = carry[0], dict(carry[1]), []
    for kind, (number, params) in zip(kinds, layers, strict=True):
        layer: Any = layer_of(module, kind)
        if mix is None:
            x = layer(params, x, batch)
            continue
        results: list[Any] = []
        mix_layer = partial(mix, kind, number, caches.get(kind))

        def mix_and_keep(
            *args: Any, mix: Any = mix_layer, results: list[Any] = results, **options: Any
        ) -> Array:
            output, cache = mix(*args, **options)
            results.append(cache)
            return output

        x = layer(params, x, batch, mix=mix_and_keep)
        assert len(results) == 1, f"a layer of kind {kind!r} mixes its tokens {len(results)} times"
        if kind in caches:
            caches[kind] = results[0]
        else:
            made += results
    return (x, caches), tuple(made)


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


def _interleave(*stacks: Array) -> Array:
    """Rows of some stacks in turn, one of each."""
    return jnp.stack(stacks, axis=1).reshape(-1, *stacks[0].shape[1:])
