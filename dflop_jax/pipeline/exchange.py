"""From encoder outputs to LLM rows and back: features move to where their samples were packed.

Sample placement on encoder ranks and on LLM ranks is independent, so the exchange is one gather by
an index from the packer; its gradient is the matching scatter-add. Output rows are the LLM's, with
zeros where a position holds no visual token.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from dflop_jax.contract import Array


def gather_features(features: Array, index: Array) -> Array:
    """features [M, items, tokens, width], index [M, rows, length] -> [M, rows, length, width].

    `index` counts over the flattened (items, tokens) of its microbatch; -1 gives zeros.
    """
    flat = features.reshape(features.shape[0], -1, features.shape[-1])
    rows = jax.vmap(lambda f, i: jnp.take(f, jnp.maximum(i, 0), axis=0))(flat, index)
    return jnp.where(
        (index >= 0)[..., None], rows, jnp.zeros((), rows.dtype)[None, None, None, None]
    )


def scatter_gradient(like: jax.ShapeDtypeStruct, dvisual: Array, index: Array) -> Array:
    """Transpose of `gather_features` for features of shape `like`."""
    zeros = jnp.zeros(like.shape, like.dtype)
    return jax.linear_transpose(partial(gather_features, index=index), zeros)(dvisual)[0]


def visual_struct(features: jax.ShapeDtypeStruct, rows: int, length: int) -> jax.ShapeDtypeStruct:
    """The exchanged array on the encoder's submesh: rows over data ranks where they divide."""
    mesh = features.sharding.mesh
    axis = "data" if rows % mesh.shape["data"] == 0 else None
    shape = (features.shape[0], rows, length, features.shape[-1])
    sharding = NamedSharding(mesh, jax.sharding.PartitionSpec(None, axis))
    return jax.ShapeDtypeStruct(shape, features.dtype, sharding=sharding)


def lower_exchange(
    features: jax.ShapeDtypeStruct, rows: int, length: int, *, backward: bool
) -> jax.stages.Lowered:
    """(features, index) -> visual, or with `backward` (dvisual, index) -> dfeatures."""
    mesh = features.sharding.mesh
    everywhere = NamedSharding(mesh, jax.sharding.PartitionSpec())
    index = jax.ShapeDtypeStruct((features.shape[0], rows, length), jnp.int32, sharding=everywhere)
    visual = visual_struct(features, rows, length)
    if backward:
        like = jax.ShapeDtypeStruct(features.shape, features.dtype)
        fn = jax.jit(partial(scatter_gradient, like), out_shardings=features.sharding)
        return fn.lower(visual, index)
    return jax.jit(gather_features, out_shardings=visual.sharding).lower(features, index)
