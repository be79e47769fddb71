"""LLaVA-form models: a vision tower, a connector and a decoder, as the engine's model contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from models import hf
from models.attention import known_kernel
from models.decoder import DecoderModule
from models.hf_sizes import folder_size
from models.hf_tensors import WeightMap
from models.lora import Lora
from models.media import vision_facts
from models.sizes import LlavaSize, find
from models.vit import VisionModule


@dataclass(frozen=True)
class Llava:
    """Modules in topological order and what the data must look like."""

    size: LlavaSize
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"

    @property
    def modules(self) -> Mapping[str, VisionModule | DecoderModule]:
        vision, decoder, kernel = self.size.vision, self.size.decoder, self.attention_kernel
        return {
            "vision": VisionModule(vision, decoder.width, self.dtype, kernel),
            "llm": DecoderModule(
                decoder, self.dtype, self.lora, self.size.layout == "anyres", kernel
            ),
        }

    @property
    def tile_px(self) -> int:
        return self.size.vision.tile_px

    @property
    def tokens_per_tile(self) -> int:
        return self.size.vision.tokens_per_tile

    @property
    def item_tokens(self) -> Mapping[str, int]:
        return {"vision": self.size.vision.tokens_in_tower}

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        return {"vision": vision_facts(self.size.vision, self.size.layout)}

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab

    def with_lora(self, rank: int, alpha: float) -> Llava:
        """The model with low-rank adapters on the LLM's matrices."""
        return replace(self, lora=Lora(rank, alpha))

    @property
    def part_weights(self) -> Mapping[str, Callable[[], WeightMap]]:
        """The same for parts that are published alone, such as a tower."""
        modules = self.modules
        return {
            "vision": lambda: hf.tower(modules["vision"]),
            "llm": lambda: hf.decoder(modules["llm"]),
        }

    @property
    def weights(self) -> WeightMap:
        """Where a checkpoint of transformers has the model's parameters."""
        return (
            hf.internvl(self) if self.size.vision.form == "internvit" else hf.llava_onevision(self)
        )


def known_dtype(name: str) -> jnp.dtype:
    """A compute dtype by name; ValueError when it is none."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"unknown compute dtype {name!r}; known: float32, bfloat16")
    return jnp.dtype(name)


def build(size: str = "tiny", dtype: str = "float32", attention_kernel: str = "auto") -> Llava:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "tiny" or "llava-ov-7b", TOWER+DECODER, or a folder
        with a config.json of transformers.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.
      attention_kernel: "auto" (by platform), "xla" or "pallas"; see `models.attention`.

    Raises:
      ValueError: unknown size, dtype or kernel; the message lists the known ones.
    """
    found = folder_size(size, "llava_onevision") or find(size)
    return Llava(found, known_dtype(dtype), attention_kernel=known_kernel(attention_kernel))
