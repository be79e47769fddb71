"""Gemma 4 without experts, per-layer embeddings or audio: a tower that takes pictures at their own
aspect ratio, and a decoder whose sliding layers let a picture's tokens see each other.

The tower's inputs: a piece is a picture or a frame of a clip, rows x columns patches of 16 x 16
  pixels, both multiples of 3. Patches go block by block (3 x 3 neighbours), in row order in both:
- grid int32 [4]: the patch's row and column, and the rows and columns of its piece's grid.
A piece of p patches gives p / 9 features, one for each block, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models import gemma4_hf
from models.composed import build_from_size
from models.decoder_model import TowerModel
from models.gemma4_tower import Gemma4VisionModule
from models.gemma_decoder import GemmaModule
from models.gemma_sizes import GEMMA4_FAMILY, GEMMA4_TEXT_FAMILY, Gemma4Size
from models.hf_tensors import HfWeightMap


@dataclass(frozen=True)
class Gemma4(TowerModel):
    """See `TowerModel`; `alone`: whether checkpoints have only a decoder."""

    size: Gemma4Size
    alone: bool = False
    tower = Gemma4VisionModule
    decoder = GemmaModule

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        v = self.size.vision
        if v is None:
            return {}
        tokens = {"soft_tokens": v.soft_tokens, "frame_tokens": v.frame_tokens}
        facts = {"form": "fitted", "patch_px": v.patch_px, "merge": v.merge, **tokens}
        return {"vision": {**facts, **dict(v.processing.facts)}}

    @property
    def weights(self) -> HfWeightMap:
        """The weight map of a checkpoint of transformers."""
        return gemma4_hf.gemma4_weights(self.modules, self.size, alone=self.alone)


def build(
    size: str = "gemma4-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Gemma4:
    """Build by size ("gemma4-31b", a folder), with pictures; see `composed.build_from_size`."""
    read = gemma4_hf.read_gemma4
    return build_from_size(Gemma4, GEMMA4_FAMILY, size, dtype, attention_kernel, read)


def build_text(
    size: str = "gemma4-text-nano", dtype: str = "float32", attention_kernel: str = "auto"
) -> Gemma4:
    """Build a text-only model by size or folder; see `models.composed.build_from_size`."""
    read = gemma4_hf.read_gemma4_text
    model = build_from_size(Gemma4, GEMMA4_TEXT_FAMILY, size, dtype, attention_kernel, read)
    return replace(model, alone=True)
