"""What models with a decoder of text have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from models.hf_tensors import HfWeightMap
from models.lora import Lora, add_adapters
from models.loss import NLL_ONLY, Objective


@dataclass(frozen=True)
class AdaptableModel(ABC):
    """Modules of which one is a decoder of text, `size.decoder`. They may have adapters."""

    size: Any
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"

    @property
    @abstractmethod
    def plain(self) -> Mapping[str, Any]:
        """The modules without adapters, in topological order."""

    @property
    def modules(self) -> Mapping[str, Any]:
        """In topological order, with adapters where there are any."""
        return add_adapters(self.plain, self.lora)

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """All rows are packed."""
        return {}

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab

    def with_lora(self, rank: int, alpha: float, **settings: Any) -> Self:
        """The model with low-rank adapters; `settings` are further ones of `models.lora.Lora`."""
        return replace(self, lora=Lora(rank, alpha, **settings))


@dataclass(frozen=True)
class DecoderModel(AdaptableModel):
    """A decoder of text at the end, and what it reads."""

    objective: Objective = NLL_ONLY

    def with_objective(self, z_loss: float, label_smoothing: float) -> Self:
        """The model whose LLM is trained on more than the plain loss; see `models.loss`."""
        return replace(self, objective=Objective(z_loss, label_smoothing))

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Where checkpoints of transformers have the parts that are published alone: none has."""
        return {}


@dataclass(frozen=True)
class TowerModel(DecoderModel):
    """A tower, if there is one, whose features stand among the decoder's tokens."""

    tower: ClassVar[Callable[..., Any]]
    decoder: ClassVar[Callable[..., Any]]

    @property
    def plain(self) -> Mapping[str, Any]:
        """The modules without adapters, in topological order."""
        s, kernel = self.size, self.attention_kernel
        modules: dict[str, Any] = {}
        if s.vision:
            modules["vision"] = self.tower(s.vision, s.decoder.width, self.dtype, kernel)
        modules["llm"] = self.decoder(
            s.decoder,
            self.dtype,
            attention_kernel=kernel,
            objective=self.objective,
            media=bool(s.vision),
        )
        return modules

    @property
    def edges(self) -> tuple[Mapping[str, Any], ...]:
        """The tower's features stand at their places among the LLM's tokens."""
        joined = {"source": "vision", "target": "llm", "name": "visual"}
        return (joined,) if self.size.vision else ()
