"""Qwen3.5 (dense): a tower at native resolution, and a decoder of gated delta nets and gated
attention; or the decoder alone.

Samples are those of `models.qwen3_vl`; no layer of the tower but the last feeds the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax.numpy as jnp

from models import qwen3_5_hf
from models.attention_choice import known_kernel
from models.composed import known_dtype
from models.hf_sizes import folder_size
from models.hf_tensors import HfWeightMap
from models.lora import Lora, adapted
from models.loss import PLAIN, Objective
from models.qwen3_5_decoder import HybridModule
from models.qwen3_5_sizes import QWEN3_5_FAMILY, QWEN3_5_TEXT_FAMILY, Qwen35Size
from models.qwen3_vl_tower import NativeVisionModule
from models.sizes import SizeFamily


@dataclass(frozen=True)
class Qwen35:
    """The tower, if any, and the decoder as a model of the engine's contract."""

    size: Qwen35Size
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"
    objective: Objective = PLAIN

    @property
    def _plain(self) -> dict[str, NativeVisionModule | HybridModule]:
        s, kernel = self.size, self.attention_kernel
        modules: dict[str, NativeVisionModule | HybridModule] = {}
        if s.vision:
            modules["vision"] = NativeVisionModule(s.vision, s.decoder.width, self.dtype, kernel)
        modules["llm"] = HybridModule(
            s.decoder,
            self.dtype,
            attention_kernel=kernel,
            objective=self.objective,
            media=bool(modules),
        )
        return modules

    @property
    def modules(self) -> Mapping[str, Any]:
        """In topological order, with adapters where there are any."""
        return adapted(self._plain, self.lora)

    @property
    def edges(self) -> tuple[Mapping[str, Any], ...]:
        """The tower's features stand among the LLM's tokens."""
        joined = {"source": "vision", "target": "llm", "name": "visual"}
        return (joined,) if self.size.vision else ()

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """All rows are packed."""
        return {}

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        v = self.size.vision
        if v is None:
            return {}
        facts = {"form": "native", "patch_px": v.patch_px, "merge": v.merge, "frames": v.frames}
        return {"vision": facts}

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab

    def with_lora(self, rank: int, alpha: float, **settings: Any) -> Self:
        """The model with low-rank adapters; `settings` are further ones of `models.lora.Lora`."""
        return replace(self, lora=Lora(rank, alpha, **settings))

    def with_objective(self, z_loss: float, label_smoothing: float) -> Self:
        """The model whose LLM is trained on more than the plain loss; see `models.loss`."""
        return replace(self, objective=Objective(z_loss, label_smoothing))

    @property
    def weights(self) -> HfWeightMap:
        """Where a checkpoint of transformers has the model's parameters."""
        return qwen3_5_hf.weight_map(self._plain, self.size)

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Where checkpoints of transformers have the parts that are published alone."""
        alone = Qwen35Size(self.size.decoder)
        return {"llm": lambda: qwen3_5_hf.weight_map({"llm": self._plain["llm"]}, alone)}


def _made(family: SizeFamily, size: str, dtype: str, attention_kernel: str) -> Qwen35:
    read = qwen3_5_hf.READERS[family.kind]
    of_size = folder_size(size, family.kind, read) or family.find(size)
    kernel = known_kernel(attention_kernel)
    return Qwen35(of_size, known_dtype(dtype), attention_kernel=kernel)


def build(
    size: str = "qwen3.5-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Qwen35:
    """A model of pictures, clips and text by size ("qwen3.5-9b", a folder); see
    `models.composed.made`."""
    return _made(QWEN3_5_FAMILY, size, dtype, attention_kernel)


def build_text(
    size: str = "qwen3.5-text-nano", dtype: str = "float32", attention_kernel: str = "auto"
) -> Qwen35:
    """A model of text alone by size (a folder); see `models.composed.made`."""
    return _made(QWEN3_5_TEXT_FAMILY, size, dtype, attention_kernel)
