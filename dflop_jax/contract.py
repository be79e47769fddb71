"""What the engine needs to know of a model: the only thing a model author has to provide.

A module is a stack of equal layers between two ends (entry and exit). Its functions are pure,
single-device code on one data rank's arrays; the engine adds sharding, pipelining and gradients
from outside. `models/` satisfies these protocols without importing this package, and any object
that does will train: Linen, NNX (split/merge) or plain functions.

Parameters of a module are one pytree `{"entry": ..., "layers": ..., "exit": ...}`; "layers" has a
leading dim of `n_layers`. A *part* is one of those three names.

Fields (`inputs`) are the host arrays of one microbatch on one data rank, leading dim `items`:
- encoders: pixels uint8 [items, tile_px, tile_px, 3]
- llm: tokens, segment_ids, positions, targets int32 [items, tokens]; weights float32
  [items, tokens], 1 where `targets` is supervised; is_visual bool [items, tokens]. Segment id 0 is
  padding. `visual` float [items, tokens, width] is made by the engine from the encoders' outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

Array = jax.Array
Params = Any
Batch = Mapping[str, Array]


class Module(Protocol):
    """One module of the model (an encoder with its connector, or the LLM); hashable, such as a
    frozen dataclass."""

    def __hash__(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def tied(self) -> bool:
        """Whether `exit` also reads the entry's parameters (a tied head)."""
        ...

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        """Field names that each part reads."""
        ...

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        """Name by which each part is frozen, e.g. {"entry": "vision", ..., "exit": "connector"}."""
        ...

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a field on one data rank."""
        ...

    def init(self, part: str, key: Array) -> Params:
        """Float32 parameters of a part; for "layers" those of a single layer."""
        ...

    def logical_axes(self, part: str) -> Params:
        """The same tree as `init`, a tuple of logical axis names (or None) per array."""
        ...

    def entry(self, params: Params, batch: Batch) -> Array:
        """Fields -> hidden states [items, tokens, width]."""
        ...

    def layer(self, params: Params, x: Array, batch: Batch) -> Array:
        """One layer on hidden states."""
        ...

    def exit(self, params: Params, x: Array, batch: Batch, entry: Params | None) -> Any:
        """Encoder: features [items, tokens_per_item, llm_width]. LLM: {"loss_sum": scalar, ...},
        sums over the microbatch, all differentiable with respect to "loss_sum" only."""
        ...

    def flops(self, part: str, items: int, tokens: int) -> float:
        """Forward FLOPs of a part (one layer for "layers"); a multiply-add counts two."""
        ...


class MultimodalModel(Protocol):
    """Modules in topological order (encoders, then "llm"), and what the data must look like."""

    @property
    def modules(self) -> Mapping[str, Module]: ...

    @property
    def tile_px(self) -> int:
        """Side of a square tile in pixels."""
        ...

    @property
    def tokens_per_tile(self) -> int:
        """Visual tokens the LLM sees for a tile."""
        ...

    @property
    def patches_per_tile(self) -> int:
        """Tokens the encoder works on for a tile."""
        ...

    @property
    def vocab_size(self) -> int: ...


# Logical axis names that tensor parallelism splits over the mesh axis "model".
MODEL_SHARDED = frozenset({"heads", "kv_heads", "mlp", "vocab"})
