"""What all compositions of encoders and a decoder have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax.numpy as jnp

from models import hf
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.hf_tensors import WeightMap
from models.lora import Lora
from models.vit import VisionModule

# Modules that are published without the others, and where their checkpoints have the parameters.
PUBLISHED_ALONE: Mapping[str, Callable[[Any], WeightMap]] = {
    "vision": hf.tower,
    "llm": hf.decoder,
}


@dataclass(frozen=True)
class Composed(ABC):
    """Modules in topological order and what the data must look like; `size` has the `decoder`."""

    size: Any
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, VisionModule | AudioModule | DecoderModule]: ...

    @property
    def edges(self) -> tuple[Mapping[str, Any], ...]:
        """Every encoder's features stand at their places among the LLM's tokens."""
        sources = {n: facts.get("sources", 1) for n, facts in self.preprocessing.items()}
        return tuple(
            {"source": n, "target": "llm", "name": "visual", "sources": sources.get(n, 1)}
            for n in self.modules
            if n != "llm"
        )

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """Tokens of a tile or a window, of which every row of an encoder holds one."""
        return {
            name: module.item_tokens
            for name, module in self.modules.items()
            if not isinstance(module, DecoderModule)
        }

    @property
    @abstractmethod
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]: ...

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab

    def with_lora(self, rank: int, alpha: float) -> Self:
        """The model with low-rank adapters on the LLM's matrices."""
        return replace(self, lora=Lora(rank, alpha))

    @property
    def part_weights(self) -> Mapping[str, Callable[[], WeightMap]]:
        """Where checkpoints of transformers have the parts that are published alone."""
        modules = self.modules
        return {n: partial(to, modules[n]) for n, to in PUBLISHED_ALONE.items() if n in modules}

    def _llm(self, newline: bool = False) -> DecoderModule:
        return DecoderModule(
            self.size.decoder, self.dtype, self.lora, newline, self.attention_kernel
        )

    def _vision(self) -> VisionModule:
        size = self.size
        return VisionModule(size.vision, size.decoder.width, self.dtype, self.attention_kernel)

    def _audio(self) -> AudioModule:
        size = self.size
        return AudioModule(size.audio, size.decoder.width, self.dtype, self.attention_kernel)


def known_dtype(name: str) -> jnp.dtype:
    """A compute dtype by name; ValueError when it is none."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"unknown compute dtype {name!r}; known: float32, bfloat16")
    return jnp.dtype(name)
