"""The common base of models with a text decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from models.fp8 import Fp8Module, fp8_product
from models.hf_tensors import HfWeightMap
from models.lora import Lora, add_adapters
from models.loss import NLL_ONLY, Objective


@dataclass(frozen=True)
class AdaptableModel(ABC):
    """Modules that include a text decoder, `size.decoder`, and may have adapters."""

    size: Any
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"
    fp8: bool = False

    @property
    @abstractmethod
    def plain(self) -> Mapping[str, Any]:
        """The modules without adapters, in topological order."""

    @property
    def modules(self) -> Mapping[str, Any]:
        """The modules in topological order, with adapters if there are any."""
        plain = self.plain
        if self.fp8:
            plain = {name: Fp8Module(module) for name, module in plain.items()}
        return add_adapters(plain, self.lora)

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """Empty: all rows are packed."""
        return {}

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab

    def with_fp8(self) -> Self:
        """Return the model with layers' products in FP8; ValueError without qwix."""
        fp8_product(1)
        return replace(self, fp8=True)

    def with_lora(self, rank: int, alpha: float, **settings: Any) -> Self:
        """Return the model with low-rank adapters; `settings` are other ones of `lora.Lora`."""
        return replace(self, lora=Lora(rank, alpha, **settings))


@dataclass(frozen=True)
class DecoderModel(AdaptableModel):
    """A text decoder at the end, and the modules that it reads."""

    objective: Objective = NLL_ONLY

    def with_objective(self, z_loss: float, label_smoothing: float) -> Self:
        """Return the model whose LLM trains with extra loss terms; see `models.loss`."""
        return replace(self, objective=Objective(z_loss, label_smoothing))

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Weight maps of transformers' checkpoints for parts that are published alone: none."""
        return {}


@dataclass(frozen=True)
class TowerModel(DecoderModel):
    """A decoder and, optionally, a tower whose features stand among the decoder's tokens."""

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
        """The edge that puts the tower's features among the LLM's tokens."""
        joined = {"source": "vision", "target": "llm", "name": "visual"}
        return (joined,) if self.size.vision else ()
