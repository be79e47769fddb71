"""What answers need of a device, told before anything is there: a copy of the parameters, and what
layers keep of the rows' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from dflop_jax.contract import MultimodalModel, stacked_parts
from dflop_jax.generate.decoding import prefill
from dflop_jax.generate.programs import TOKEN_MULTIPLE
from dflop_jax.generate.replica import MODEL, PARAMS_SHARE, param_shapes, spec_of
from dflop_jax.generate.row import LLM, bucket_of
from dflop_jax.pipeline.parts import logical_axes

GROWING = 1.5  # while a batch gets twice the slots it has the old ones, too


def device_bytes(model: MultimodalModel, rows: int, tokens: int, ways: int) -> float:
    """Bytes that a device of `ways`, which share the parameters, needs to answer; without what it
    computes while prompts are read.

    Args:
      rows: prompts that they answer at once.
      tokens: of the longest prompt and its answer.
    """
    params = sum(
        _shard_bytes(struct, axes, ways, lead=part in stacked_parts(module))
        for module in model.modules.values()
        for part, structs in param_shapes(module).items()
        for struct, axes in _pairs(structs, logical_axes(module, part))
    )
    # `replica.least_ways` splits parameters further rather than let them take more than this share.
    return max(params / PARAMS_SHARE, params + GROWING * _cache_bytes(model, rows, tokens, ways))


def _cache_bytes(model: MultimodalModel, rows: int, tokens: int, ways: int) -> float:
    llm: Any = model.modules[LLM]
    slots = bucket_of(tokens, TOKEN_MULTIPLE)
    names = {n for part in ("entry", *stacked_parts(llm)) for n in llm.inputs[part]}
    batch = {name: llm.field_spec(name, rows, slots) for name in names}
    last = jax.ShapeDtypeStruct((rows,), jnp.int32)
    run = partial(prefill, llm, slots=slots, inlets={})
    _, cache = jax.eval_shape(run, param_shapes(llm), batch, last)
    return sum(
        _shard_bytes(struct, axes, ways, lead=True)
        for kind, kept in cache.kept.items()
        for struct, axes in _pairs(kept, llm.memory(kind).axes)
    )


def _pairs(structs: Any, axes: Any) -> list[tuple[Any, Any]]:
    """Every array of a tree with its logical axes."""
    tree: Any = jax.tree.structure(structs)
    return list(zip(jax.tree.leaves(structs), tree.flatten_up_to(axes), strict=True))


def _shard_bytes(struct: Any, axes: Sequence[str | None], ways: int, *, lead: bool) -> float:
    """Bytes of an array on each of the devices that share it; `lead`: layers are stacked."""
    whole = prod(struct.shape) * struct.dtype.itemsize
    return whole / ways if MODEL in spec_of(struct.shape[lead:], axes, ways) else whole
