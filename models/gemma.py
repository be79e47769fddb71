"""Gemma 3 (arXiv 2503.19786): a SigLIP tower whose pooled patches are projected to soft tokens, and
a decoder in which a picture's tokens see each other; or the decoder alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import gemma_hf
from models.composed import build_from_size
from models.connector import merge_patches
from models.decoder_model import TowerModel
from models.gemma_decoder import GemmaModule
from models.gemma_sizes import GEMMA3_FAMILY, GEMMA3_TEXT_FAMILY, Gemma3Size
from models.hf_tensors import HfWeightMap
from models.layers import LayerNorm, Linear, RMSNorm
from models.sizes import VisionSize
from models.vit import VisionModule

Array = jax.Array


class SoftTokens(nn.Module):
    """Final norm, mean over `merge` squared patches, a norm with an offset, a projection."""

    size: VisionSize
    out_width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s = self.size
        x = LayerNorm(s.norm_eps, name="post_norm")(x)
        x = merge_patches(x, s.grid, s.merge)
        x = x.reshape(*x.shape[:2], s.merge**2, s.width).mean(axis=2)
        x = RMSNorm(s.norm_eps, offset=1.0, name="soft_norm")(x)
        width, out_shape = (s.width,), (self.out_width,)
        return Linear(width, out_shape, (None,), ("embed",), self.dtype, name="projection")(x)


@dataclass(frozen=True)
class Gemma3VisionModule(VisionModule):
    """See `VisionModule`; an item is a picture."""

    def _end(self, part: str) -> nn.Module:
        if part == "entry":
            return super()._end(part)
        return SoftTokens(self.size, self.out_width, self.dtype)


@dataclass(frozen=True)
class Gemma3(TowerModel):
    """See `TowerModel`; the tower's features are soft tokens."""

    size: Gemma3Size
    tower = Gemma3VisionModule
    decoder = GemmaModule

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """Patches of a picture; every row of the tower holds one picture."""
        return {"vision": self.size.vision.tokens_in_tower} if self.size.vision else {}

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        v = self.size.vision
        if v is None:
            return {}
        facts = {"form": "square", "tile_px": v.tile_px, "tokens_per_tile": v.tokens_per_tile}
        return {"vision": facts}

    @property
    def weights(self) -> HfWeightMap:
        """The weight map of a checkpoint of transformers."""
        return gemma_hf.gemma3_weights(self.modules, self.size)


def build(
    size: str = "gemma3-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Gemma3:
    """Build by size ("gemma3-4b", a folder), with pictures; see `composed.build_from_size`."""
    return build_from_size(
        Gemma3, GEMMA3_FAMILY, size, dtype, attention_kernel, gemma_hf.read_gemma3
    )


def build_text(
    size: str = "gemma3-text-nano", dtype: str = "float32", attention_kernel: str = "auto"
) -> Gemma3:
    """Build by size ("gemma3-1b", a folder) for text alone; see `composed.build_from_size`."""
    return build_from_size(
        Gemma3, GEMMA3_TEXT_FAMILY, size, dtype, attention_kernel, gemma_hf.read_gemma3_text
    )
