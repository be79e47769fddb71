"""Ceilings, attention and the head by themselves: cases of `benchmarks/gpu_step.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_measure import Bench, Case, Line

from dflop_jax.contract import chip_of
from models.attention import attention
from models.attention_choice import choose
from models.decoder import DecoderModule
from models.sizes import DecoderSize

BF16 = jnp.dtype("bfloat16")
Tree = Any


def packed_row(tokens: int, median: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """Segment ids int32 [1, tokens] of a row of whole samples and a little padding at its end, and
    the samples' lengths (log-normal)."""
    rng = np.random.default_rng(seed)
    ids, lengths, start = np.zeros((1, tokens), np.int32), [], 0
    while start < tokens * 0.98:
        length = min(tokens - start, max(4, int(median * math.exp(rng.normal()))))
        lengths.append(length)
        ids[0, start : start + length] = len(lengths)
        start += length
    return ids, lengths


def draw(structs: Tree, scale: float = 1.0) -> Tree:
    """Random floats on the structs' device; whole numbers are 0."""

    def one(key: jax.Array, a: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.zeros(a.shape, a.dtype)
        return (scale * jax.random.normal(key, a.shape, jnp.float32)).astype(a.dtype)

    leaves, tree = jax.tree.flatten(structs)
    if not leaves:
        return structs

    def values() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
        return [one(k, a) for k, a in zip(keys, leaves, strict=True)]

    return jax.tree.unflatten(tree, jax.jit(values, out_shardings=[a.sharding for a in leaves])())


def _zeros(structs: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), structs)


# ---- ceilings ----


def ceilings(bench: Bench, size: int, depths: Sequence[int], n_bytes: int) -> Iterator[Case]:
    """Products of [size, depth] and [depth, size], and copies of `n_bytes`, of random values and of
    zeros, at which a chip draws less power and clocks higher."""
    fills: tuple[tuple[str, Callable[..., Tree]], ...] = (("random", draw), ("zeros", _zeros))
    for depth in depths:
        args = (bench.struct((size, depth), BF16), bench.struct((depth, size), BF16))
        for fill, make in fills:
            yield Case(
                {"name": "product", "rows": size, "depth": depth, "values": fill},
                partial(jax.jit(jnp.matmul).lower, *args),
                partial(make, args),
                flops=2.0 * size * size * depth,
            )
    source = bench.struct((n_bytes // 2,), BF16)
    for fill, make in fills:
        yield Case(
            {"name": "copy", "bytes": n_bytes, "values": fill},
            partial(jax.jit(lambda a: -a).lower, source),
            partial(lambda make: (make(source),), make),
            n_bytes=2.0 * n_bytes,
        )


# ---- attention ----


def attention_cases(
    bench: Bench,
    name: str,
    shape: tuple[int, int, int, int],
    kv_heads: int,
    lengths: Sequence[int] | None,
    *,
    causal: bool,
    checked: bool = False,
) -> Iterator[Case]:
    """Each kernel forward, and forward with backward.

    Args:
      shape: of queries [rows, tokens, heads, head_dim].
      lengths: of the pieces that one row packs; None where all tokens see each other.
      checked: whether outputs and gradients are compared with float32.
    """
    rows, tokens, heads, head_dim = shape
    q, kv = (bench.struct((rows, tokens, n, head_dim), BF16) for n in (heads, kv_heads))
    ids = None if lengths is None else bench.struct((rows, tokens), jnp.int32)
    pairs = rows * sum(n * (n + 1) // 2 if causal else n * n for n in lengths or (tokens,))
    flops = 4.0 * pairs * heads * head_dim
    make = partial(_attention_inputs, q, kv, ids, lengths)
    chip, known = chip_of(bench.device), ("pallas", "cudnn") if chip_is_gpu(bench) else ("pallas",)
    exact = _exact(make, causal) if checked and bench.runs else None
    for kernel in (*known, "xla") if checked else known:
        if choose(kernel, chip, BF16, shape, is_packed=ids is not None) != kernel:
            continue
        call = partial(attention, causal=causal, kernel=kernel, chip=chip)
        for direction, function, times in (("forward", call, 1), ("both", _both(call), 3.5)):
            yield Case(
                {"name": f"attention {name}", "kernel": kernel, "direction": direction,
                 "tokens": tokens, "rows": rows},
                partial(_lower_attention, function, q, kv, ids, direction),
                partial(lambda make, d: make() if d == "both" else make()[:4], make, direction),
                flops=times * flops,
                check=partial(_errors, exact if direction == "both" else None),
                seen_pairs=pairs / (rows * tokens**2),
            )  # fmt: skip


def chip_is_gpu(bench: Bench) -> bool:
    return chip_of(bench.device).startswith("sm_")


def _both(call: Callable[..., Any]) -> Callable[..., Any]:
    """Output and gradients of queries, keys and values."""

    def both(q: Any, k: Any, v: Any, ids: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, ids), q, k, v)
        return out, *pull(dout)

    return both


def _lower_attention(
    function: Callable[..., Any], q: Any, kv: Any, ids: Any, direction: str
) -> jax.stages.Lowered:
    extra = (q,) if direction == "both" else ()
    return jax.jit(function).lower(q, kv, kv, ids, *extra)


def _attention_inputs(q: Any, kv: Any, ids: Any, lengths: Any) -> tuple[Any, ...]:
    """Queries, keys, values, segment ids and a cotangent."""
    queries, keys, values, dout = draw((q, kv, kv, q))
    if ids is not None:
        row = np.zeros(ids.shape[1], np.int32)
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
        ids = jax.device_put(np.broadcast_to(row, ids.shape), ids.sharding)
    return queries, keys, values, ids, dout


def _exact(make: Callable[[], tuple[Any, ...]], causal: bool) -> Any:
    """Output and gradients in float32."""
    q, k, v, ids, dout = make()
    wide = [a.astype(jnp.float32) for a in (q, k, v, dout)]
    call = partial(attention, causal=causal, kernel="xla")
    with jax.default_matmul_precision("highest"):
        return jax.device_get(jax.jit(_both(call))(*wide[:3], ids, wide[3]))


def _errors(exact: Any, found: Any) -> Line:
    """Largest error of output and gradients over their largest value."""
    if exact is None:
        return {}
    pairs = zip(found, exact, strict=True)
    return {"errors": [float(np.abs(np.float32(a) - b).max() / np.abs(b).max()) for a, b in pairs]}


# ---- the head ----


def head(bench: Bench, size: DecoderSize, tokens: int) -> Iterator[Case]:
    """Final norm, logits, loss and their gradient, in chunks of the vocabulary's logits."""
    module = DecoderModule(replace(size, tied=False), BF16).on_chip(chip_of(bench.device))
    params = jax.eval_shape(lambda: module.init("exit", jax.random.key(0)))
    params = jax.tree.map(lambda a: bench.struct(a.shape, BF16), params)
    hidden = bench.struct((1, tokens, size.width), BF16)
    fields = {n: module.field_spec(n, 1, tokens) for n in module.inputs["exit"]}
    fields = {n: bench.struct(a.shape, a.dtype) for n, a in fields.items()}

    def gradient(params: Tree, hidden: jax.Array, fields: Tree) -> Any:
        def loss(params: Tree, hidden: jax.Array) -> jax.Array:
            return module.exit(params, hidden, fields)["loss_sum"]

        return jax.grad(loss, argnums=(0, 1))(params, hidden)

    args = params, hidden, fields
    yield Case(
        {"name": "head", "direction": "both", "tokens": tokens, "vocab": size.vocab},
        partial(jax.jit(gradient).lower, *args),
        partial(draw, args, 0.05),
        flops=6.0 * tokens * size.width * size.vocab,
    )
