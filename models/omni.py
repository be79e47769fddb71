"""Pictures, clips and sound in one model: two encoders side by side and one decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from models import hf
from models.attention import known_kernel
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.hf_tensors import WeightMap
from models.llava import known_dtype
from models.lora import Lora
from models.media import audio_facts, vision_facts
from models.sizes import OmniSize, find_omni
from models.vit import VisionModule


@dataclass(frozen=True)
class Omni:
    """Modules in topological order and what the data must look like."""

    size: OmniSize
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"

    @property
    def modules(self) -> Mapping[str, VisionModule | AudioModule | DecoderModule]:
        s, width, kernel = self.size, self.size.decoder.width, self.attention_kernel
        return {
            "vision": VisionModule(s.vision, width, self.dtype, kernel),
            "audio": AudioModule(s.audio, width, self.dtype, kernel),
            "llm": DecoderModule(s.decoder, self.dtype, self.lora, s.layout == "anyres", kernel),
        }

    @property
    def item_tokens(self) -> Mapping[str, int]:
        return {"vision": self.size.vision.tokens_in_tower, "audio": self.size.audio.positions}

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        s = self.size
        return {
            "vision": vision_facts(s.vision, s.layout),
            "audio": audio_facts(s.audio, s.max_windows),
        }

    def with_lora(self, rank: int, alpha: float) -> Omni:
        """The model with low-rank adapters on the LLM's matrices."""
        return replace(self, lora=Lora(rank, alpha))

    @property
    def part_weights(self) -> Mapping[str, Callable[[], WeightMap]]:
        """Where checkpoints of transformers have the parts that are published alone."""
        modules = self.modules
        return {
            "vision": lambda: hf.tower(modules["vision"]),
            "llm": lambda: hf.decoder(modules["llm"]),
        }

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab


def build(size: str = "omni-tiny", dtype: str = "float32", attention_kernel: str = "auto") -> Omni:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "omni-tiny", or VISION+AUDIO+DECODER.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.
      attention_kernel: "auto" (by platform), "xla" or "pallas"; see `models.attention`.

    Raises:
      ValueError: unknown size or dtype; the message lists the known ones.
    """
    kernel = known_kernel(attention_kernel)
    return Omni(find_omni(size), known_dtype(dtype), attention_kernel=kernel)
