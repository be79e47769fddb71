"""Towers that take pictures at their own aspect ratio: a row holds pieces of any length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.attention_choice import MIN_KERNEL_TOKENS
from models.encoder import Encoder
from models.linen_module import Batch

Array = jax.Array


@dataclass(frozen=True)
class PackedEncoder(Encoder):
    """See `Encoder`; `size.block` patches become a feature. Each patch has `size.patch_values`
    values and its place in the grid of its piece."""

    @property
    def item_tokens(self) -> int:
        """Patches of the smallest picture."""
        block: int = self.size.block
        return block

    @property
    def row_tokens(self) -> int:
        return MIN_KERNEL_TOKENS

    @property
    def n_padding(self) -> int:
        """0: plans give rows a multiple of tokens."""
        return 0

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {"entry": ("patches", "grid"), "layers": ("segment_ids", "grid"), "exit": ()}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {"entry": "vision", "layers": "vision", "exit": "connector"}

    def segment_ids(self, batch: Batch) -> Array:
        return batch["segment_ids"]

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Return a struct: `patches` uint8 [items, tokens, values], `grid` int32 [.., .., 4]."""
        shapes = {
            "patches": ((self.size.patch_values,), jnp.uint8),
            "grid": ((4,), jnp.int32),
            "segment_ids": ((), jnp.int32),
        }
        if name not in shapes:
            raise ValueError(
                f"the vision module has no field {name!r}; it reads {', '.join(shapes)}"
            )
        dims, dtype = shapes[name]
        return jax.ShapeDtypeStruct((items, tokens, *dims), dtype)
