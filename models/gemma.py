"""Gemma 3 (arXiv 2503.19786): a SigLIP tower whose pooled patches are projected to soft tokens, and
a decoder in which a picture's tokens all see each other; or the decoder alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import gemma_hf
from models.attention_choice import known_kernel
from models.composed import known_dtype
from models.connector import merge_patches
from models.gemma_decoder import GemmaModule
from models.gemma_sizes import GEMMA3_FAMILY, GEMMA3_TEXT_FAMILY, Gemma3Size
from models.hf_sizes import folder_size
from models.hf_tensors import HfWeightMap
from models.layers import LayerNorm, Linear, RMSNorm
from models.lora import Lora, adapted
from models.loss import PLAIN, Objective
from models.sizes import SizeFamily, VisionSize
from models.vit import VisionModule

Array = jax.Array


class SoftTokens(nn.Module):
    """Final norm of the tower, the mean of `merge` squared neighbouring patches, a norm around one,
    a projection."""

    size: VisionSize
    out_width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s = self.size
        x = LayerNorm(s.norm_eps, name="post_norm")(x)
        x = merge_patches(x, s.grid, s.merge)
        x = x.reshape(*x.shape[:2], s.merge**2, s.width).mean(axis=2)
        x = RMSNorm(s.norm_eps, around=1.0, name="soft_norm")(x)
        width, out = (s.width,), (self.out_width,)
        return Linear(width, out, (None,), ("embed",), self.dtype, name="projection")(x)


@dataclass(frozen=True)
class Gemma3VisionModule(VisionModule):
    """See `VisionModule`; an item is a picture."""

    def _end(self, part: str) -> nn.Module:
        if part == "entry":
            return super()._end(part)
        return SoftTokens(self.size, self.out_width, self.dtype)


@dataclass(frozen=True)
class Gemma3:
    """The tower, if any, and the decoder as a model of the engine's contract."""

    size: Gemma3Size
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"
    objective: Objective = PLAIN

    @property
    def modules(self) -> Mapping[str, Any]:
        """In topological order, with adapters where there are any."""
        size, kernel = self.size, self.attention_kernel
        modules: dict[str, Gemma3VisionModule | GemmaModule] = {}
        if size.vision:
            width = size.decoder.width
            modules["vision"] = Gemma3VisionModule(size.vision, width, self.dtype, kernel)
        modules["llm"] = GemmaModule(
            size.decoder,
            self.dtype,
            attention_kernel=kernel,
            objective=self.objective,
            media=bool(size.vision),
        )
        return adapted(modules, self.lora)

    @property
    def edges(self) -> tuple[Mapping[str, Any], ...]:
        """Soft tokens stand at their places among the LLM's tokens."""
        joined = {"source": "vision", "target": "llm", "name": "visual"}
        return (joined,) if self.size.vision else ()

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """Patches of a picture, of which every row of the tower holds one."""
        return {"vision": self.size.vision.tokens_in_tower} if self.size.vision else {}

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        v = self.size.vision
        if v is None:
            return {}
        facts = {"form": "square", "tile_px": v.tile_px, "tokens_per_tile": v.tokens_per_tile}
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
        return gemma_hf.gemma3(self.modules, self.size)

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Where checkpoints of transformers have the parts that are published alone: none has."""
        return {}


def _made(family: SizeFamily, size: str, dtype: str, attention_kernel: str) -> Gemma3:
    read = gemma_hf.READERS[family.kind]
    of_size = folder_size(size, family.kind, read) or family.find(size)
    kernel = known_kernel(attention_kernel)
    return Gemma3(of_size, known_dtype(dtype), attention_kernel=kernel)


def build(
    size: str = "gemma3-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Gemma3:
    """A model of pictures and text by size ("gemma3-4b", a folder); see `models.composed.made`."""
    return _made(GEMMA3_FAMILY, size, dtype, attention_kernel)


def build_text(
    size: str = "gemma3-text-nano", dtype: str = "float32", attention_kernel: str = "auto"
) -> Gemma3:
    """A model of text alone by size ("gemma3-1b", a folder); see `models.composed.made`."""
    return _made(GEMMA3_TEXT_FAMILY, size, dtype, attention_kernel)
