"""Measurement of the share of a gather or reduction that products in the same program hide.

ZeRO gathers a layer's parameters while the previous layer runs, and scatters gradients in the loop
over layers (`runtime.segment_functions`). The timed loops do the same with one product per layer;
their time is compared with that of the products alone and of the collectives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.profile.collectives import ring_s
from dflop_jax.profile.kernels import Efficiency
from dflop_jax.profile.links import Call, Sync, local_meshes, median_call_s, node_blocks
from dflop_jax.records import Hardware
from dflop_jax.runtime.communicator import zeros

# Layers of a timed loop, and the side of a layer's matrix: 32 MiB in bfloat16, so that a collective
# takes many times its start-up. Twice the side takes four times the memory.
_LAYERS, _WIDTH = 8, 4096
_MULTIPLE = 128  # of tokens and sides, for whole tiles of matrix units
_MAX_TOKENS = 1 << 15  # 256 MiB of hidden states

ZeroCollective = Literal["all_gather", "reduce_scatter"]
Loop = Literal["products", "collectives", "both"]
ZERO_COLLECTIVES: tuple[ZeroCollective, ...] = ("all_gather", "reduce_scatter")
LOOPS: tuple[Loop, ...] = ("products", "collectives", "both")


@dataclass(frozen=True)
class OverlapTiming:
    """Time of a loop whose collectives are inside nodes or across nodes."""

    collective: ZeroCollective
    across: bool
    loop: Loop
    seconds: float


def time_overlaps(
    devices: Sequence[jax.Device], hardware: Hardware, sync: Sync
) -> list[OverlapTiming]:
    """Time the loops; all processes call this. `hardware`: devices per node, and rates for a size
    at which products and collectives take about equally long; `sync` as for `time_links`."""
    node = hardware.devices_per_node
    blocks = node_blocks(devices, node)
    timings: list[OverlapTiming] = []
    for across, ranks in ((False, node), (True, len(blocks))):
        meshes, width = local_meshes(blocks, across), _round_up(_WIDTH, _MULTIPLE * ranks)
        for collective in ZERO_COLLECTIVES if ranks > 1 else ():
            itemsize = 2 if collective == "all_gather" else 4
            stride = node if across else 1
            transfer_s = ring_s(collective, itemsize * width**2, ranks, hardware, stride=stride)
            flops = transfer_s * hardware.peak_flops("bfloat16") * Efficiency().matmul
            tokens = min(_round_up(flops / (2 * width**2), _MULTIPLE), _MAX_TOKENS)
            for loop in LOOPS:
                calls = [_loop_call(collective, loop, m, tokens, width) for m in meshes]
                seconds = median_call_s(calls, sync)
                timings.append(OverlapTiming(collective, across, loop, seconds))
    return timings


def overlap_factors(timings: Sequence[OverlapTiming]) -> dict[bool, float]:
    """Return the overlap factor (`collectives.overlapped_s`) of the timed links, by `across`: the
    hidden share of what could be hidden, over both collectives."""
    seconds = {(t.collective, t.across, t.loop): t.seconds for t in timings}
    factors = {}
    for across in dict.fromkeys(t.across for t in timings):
        hidden_s, shorter_s = 0.0, 0.0
        for collective in ZERO_COLLECTIVES:
            products_s, collectives_s, both_s = (seconds[collective, across, x] for x in LOOPS)
            hidden_s += products_s + collectives_s - both_s
            shorter_s += min(products_s, collectives_s)
        factors[across] = float(np.clip(hidden_s / shorter_s, 0.0, 1.0))
    return factors


def _round_up(n: float, multiple: int) -> int:
    return max(1, -(-int(n) // multiple)) * multiple


def _loop_call(collective: ZeroCollective, loop: Loop, mesh: Mesh, tokens: int, width: int) -> Call:
    """Compile a loop over layers on a mesh ("node", "rank") and return a call on zeros. A layer
    multiplies hidden states [tokens, width] by a matrix [width, width]; beside it, the next matrix
    is gathered in bfloat16, or a gradient of its size is scattered in float32."""
    ranks, has_products = mesh.shape["rank"], loop != "collectives"
    gathers = collective == "all_gather" and loop != "products"
    scatters = collective == "reduce_scatter" and loop != "products"

    def visit(carry: Any, shard: jax.Array) -> tuple[Any, Any]:
        x, matrix, gradient = carry
        next_matrix = lax.all_gather(shard, "rank", tiled=True) if gathers else matrix
        scattered = lax.psum_scatter(gradient, "rank", tiled=True) if scatters else None
        if has_products:
            x = x @ matrix
        if scatters:  # the next layer's gradient is another array, or one reduction would do
            gradient = gradient + 1.0
        return (x, next_matrix, gradient), scattered

    def body(x: jax.Array, shards: jax.Array) -> Any:
        matrix = jnp.zeros((width, width), x.dtype) + x[0, 0, 0, 0]
        start = x[0, 0], matrix, matrix.astype(jnp.float32)
        (x, matrix, _), scattered = lax.scan(visit, start, shards[0, 0])
        return jax.tree.map(lambda a: a[None, None], (x, matrix, scattered))

    split = P("node", "rank")
    sharding = NamedSharding(mesh, split)
    shapes = (tokens, width), (_LAYERS, width // ranks, width)
    structs = [
        jax.ShapeDtypeStruct((*mesh.devices.shape, *shape), jnp.bfloat16, sharding=sharding)
        for shape in shapes
    ]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return partial(jax.jit(mapped).lower(*structs).compile(), *map(zeros, structs))
