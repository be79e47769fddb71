"""Decoding one token at a time, in static shapes: each layer keeps of the tokens so far what the
memory of its kind says.

`prefill` runs the prompts, padded to one length; `decode` adds one token to each row.

Shape suffixes: B rows, T tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from dflop_jax.generate.row import LLM, loops_of


class Cache(NamedTuple):
    """What the layers keep of the tokens so far, by kind, layers stacked; and what to add to a
    further token's place in its row for its position: not 0 where a picture takes fewer or more
    positions than tokens."""

    kept: dict[str, Any]
    ahead_B: Array


def inlets_of(model: MultimodalModel) -> dict[str, int]:
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
      inlets: see `inlets_of`.

    Returns:
      float32 logits [B, V] of what follows the prompts, and the cache.
    """
    B, T = batch["tokens"].shape
    assert slots >= T, (slots, T)
    memories = _memories(module)
    x_BTD, kept = module.entry(with_adapter("entry", params), batch), dict[str, list[Any]]()
    for start, stop in pairwise(sorted({0, *inlets.values(), module.n_layers})):
        for loop, _, period in loops_of(module, params, start, stop):

            def run(
                x: Array, layers: Sequence[Params], kinds: Sequence[Any] = loop.period
            ) -> tuple[Array, tuple[Any, ...]]:
                kept = []
                for kind, p in zip(kinds, layers, strict=True):

                    def mix(*args: Any, kind: str = kind, **how: Any) -> tuple[Array, Any]:
                        return memories[kind].prompt(last_B, slots, *args, **how)

                    x, of_layer = _layer(module, kind, p, x, batch, mix)
                    kept.append(of_layer)
                return x, tuple(kept)

            x_BTD, of_loop = jax.lax.scan(run, x_BTD, period)
            for kind in dict.fromkeys(loop.period):
                own = [a for k, a in zip(loop.period, of_loop, strict=True) if k == kind]
                kept.setdefault(kind, []).append(jax.tree.map(_alternating, *own))
        for name in (name for name, n in inlets.items() if n == stop):
            inlet: Any = module.inlet  # type: ignore[attr-defined]
            x_BTD = inlet(name, x_BTD, batch[name], batch)
    ahead_B = jnp.zeros_like(last_B)
    if "positions" in batch:
        known_BT1 = (jnp.arange(T)[None] <= last_B[:, None])[:, :, None]
        positions_BTA = batch["positions"].reshape(B, T, -1)
        ahead_B = jnp.where(known_BT1, positions_BTA, 0).max(axis=(1, 2)) - last_B
    last_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    logits = module.logits(params["exit"], last_B1D, params["entry"])[:, 0]
    whole = {k: jax.tree.map(lambda *a: jnp.concatenate(a), *parts) for k, parts in kept.items()}
    return logits, Cache(whole, ahead_B)


def decode(
    module: GeneratingModule, params: Params, cache: Cache, tokens_B: Array, places_B: Array
) -> tuple[Array, Cache]:
    """Run the token at one place of each row; all before it have been run.

    Returns:
      float32 logits [B, V] of what follows, and the cache with the tokens added. Donate the cache:
      it is then changed in place.
    """
    batch, memories = _fields(module, tokens_B, places_B + cache.ahead_B), _memories(module)
    x_BTD, kept = module.entry(with_adapter("entry", params), batch), dict(cache.kept)
    for loop, rows, period in loops_of(module, params, 0, module.n_layers):
        # What is kept is carried, not scanned over: so a layer may write one slot and copy nothing.
        def run(
            carry: tuple[Array, dict[str, Any]],
            layers: Sequence[tuple[Array, Params]],
            kinds: Sequence[Any] = loop.period,
        ) -> tuple[tuple[Array, dict[str, Any]], None]:
            x, kept = carry[0], dict(carry[1])
            for kind, (n, p) in zip(kinds, layers, strict=True):

                def mix(
                    *args: Any, kind: str = kind, n: Array = n, held: Any = kept[kind], **how: Any
                ) -> tuple[Array, Any]:
                    return memories[kind].token(held, n, places_B, *args, **how)

                x, kept[kind] = _layer(module, kind, p, x, batch, mix)
            return (x, kept), None

        numbers = (jnp.arange(r.start, r.stop, r.step) for r in rows)
        (x_BTD, kept), _ = jax.lax.scan(
            run, (x_BTD, kept), tuple(zip(numbers, period, strict=True))
        )
    logits = module.logits(params["exit"], x_BTD, params["entry"])[:, 0]
    return logits, Cache(kept, cache.ahead_B)


def grown(module: GeneratingModule, cache: Cache, slots: int) -> Cache:
    """The cache for rows of up to `slots` tokens, more than it was for."""
    memories = _memories(module)
    return Cache({k: memories[k].grown(a, slots) for k, a in cache.kept.items()}, cache.ahead_B)


def _memories(module: GeneratingModule) -> dict[str, Any]:
    return {kind: module.memory(kind) for kind in dict.fromkeys(layer_kinds_of(module))}


def _layer(
    module: GeneratingModule,
    kind: str,
    params: Params,
    x: Array,
    batch: Mapping[str, Array],
    mix: Callable[..., tuple[Array, Any]],
) -> tuple[Array, Any]:
    """Hidden states after a layer, and what it keeps."""
    kept: list[Any] = []

    def mixed(*args: Any, **how: Any) -> Array:
        out, of_layer = mix(*args, **how)
        kept.append(of_layer)
        return out

    of_kind: Any = layer_of(module, kind)
    x = of_kind(params, x, batch, mix=mixed)
    assert len(kept) == 1, f"a layer of kind {kind!r} mixes its tokens {len(kept)} times"
    return x, kept[0]


def _fields(module: GeneratingModule, tokens_B: Array, positions_B: Array) -> dict[str, Array]:
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
        now = positions_B.reshape(B, *[1] * (len(shape) - 1))
        batch["positions"] = jnp.broadcast_to(now, shape)
    return batch


def _alternating(*stacks: Array) -> Array:
    """Rows of some stacks in turn, one of each."""
    return jnp.stack(stacks, axis=1).reshape(-1, *stacks[0].shape[1:])
