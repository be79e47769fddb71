"""LLaVA-form models: a vision tower, a connector and a decoder, as the engine's model contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.decoder import DecoderModule
from models.sizes import LlavaSize, find
from models.vit import VisionModule


@dataclass(frozen=True)
class Llava:
    """Modules in topological order and what the data must look like."""

    size: LlavaSize
    dtype: jnp.dtype

    @property
    def modules(self) -> Mapping[str, VisionModule | DecoderModule]:
        vision, decoder = self.size.vision, self.size.decoder
        return {
            "vision": VisionModule(vision, decoder.width, self.dtype),
            "llm": DecoderModule(decoder, self.dtype),
        }

    @property
    def tile_px(self) -> int:
        return self.size.vision.tile_px

    @property
    def tokens_per_tile(self) -> int:
        return self.size.vision.tokens_per_tile

    @property
    def patches_per_tile(self) -> int:
        return self.size.vision.patches_per_tile

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab


def build(size: str = "tiny", dtype: str = "float32") -> Llava:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "tiny" or "llava-ov-7b", or VISION+DECODER.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.

    Raises:
      ValueError: unknown size or dtype; the message lists the known ones.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"unknown compute dtype {dtype!r}; known: float32, bfloat16")
    return Llava(find(size), jnp.dtype(dtype))
