"""An LLM without a head, whose hidden states feed another module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import hf
from models.decoder import DecoderModule
from models.embedding import embed
from models.hf_tensors import HfWeightMap
from models.layers import Linear, RMSNorm, apply, named_init, normal
from models.linen_module import Batch
from models.sizes import DecoderSize

Array = jax.Array


class TextEntry(nn.Module):
    """Token embeddings."""

    size: DecoderSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        s = self.size
        init = named_init(normal(s.width**-0.5), "vocab", "embed")
        table = self.param("embedding", init, (s.vocab, s.width), jnp.float32)
        return embed(table, tokens).astype(self.dtype)


class TextExit(nn.Module):
    """Final norm, and a linear layer to the width of the module that reads the states."""

    size: DecoderSize
    out_width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = RMSNorm(self.size.norm_eps, name="norm")(x)
        width, out_shape = (self.size.width,), (self.out_width,)
        return Linear(width, out_shape, ("embed",), (None,), self.dtype, True, name="connector")(x)


@dataclass(frozen=True)
class TextStates(DecoderModule):
    """See `DecoderModule`; features are [rows, tokens, out_width], one per token."""

    out_width: int = 0

    @property
    def tied(self) -> bool:
        """False: there is no head."""
        return False

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {**super().inputs, "entry": ("tokens",), "exit": ()}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {**super().freeze_groups, "exit": "connector"}

    def _linen_part(self, part: str) -> tuple[nn.Module, tuple[Any, ...]]:
        if part == "entry":
            return TextEntry(self.size, self.dtype), (self.field_spec("tokens", 1, 1),)
        if part == "exit":
            hidden = jax.ShapeDtypeStruct((1, 1, self.size.width), self.dtype)
            return TextExit(self.size, self.out_width, self.dtype), (hidden,)
        return super()._linen_part(part)

    def exit(self, params: Any, x: Array, batch: Batch, entry: Any = None) -> Any:
        """Return normed hidden states, projected to `out_width`."""
        return apply(TextExit(self.size, self.out_width, self.dtype), params, x)

    @property
    def weights(self) -> HfWeightMap:
        """The weight map of a checkpoint of transformers, whose head is ignored."""
        map_ = hf.decoder_weights(self)
        return replace(map_, ignored=(*map_.ignored, r"lm_head\.weight"))
