"""Qwen3-VL (arXiv 2511.21631), dense: a tower at native resolution, DeepStack, a Qwen3 decoder.

The modules' inputs:

"vision": a piece is a picture, or a pair of consecutive frames of a clip, at its own resolution:
  rows x columns patches of 16 x 16 pixels, both even. A picture is used twice, as a pair. A clip's
  pairs are separate pieces, in order of time; they do not see each other. A piece's patches are
  ordered by block (2 x 2 neighbouring patches): blocks in row order, and in a block (top left, top
  right, bottom left, bottom right). Each patch has:
- grid int32 [4]: the patch's row and column, and the rows and columns of its piece's grid, all
  counted in patches.
A piece of p patches gives p / 4 features, one for each block, in order.

"llm": a piece is a sample's sequence of tokens. Features of "vision" replace the placeholders
  (`is_visual`), one to one in the order of the sample's pieces. Besides the fields of other
  decoders (tokens, targets, weights, is_visual) a sample has
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models import hf
from models.composed import build_from_size
from models.decoder import DecoderModule
from models.decoder_model import TowerModel
from models.hf_tensors import HfWeightMap
from models.qwen3_vl_sizes import QWEN3_VL_FAMILY, Qwen3VLSize
from models.qwen3_vl_tower import NativeVisionModule


@dataclass(frozen=True)
class NativeModel(TowerModel):
    """See `TowerModel`; the tower takes pictures and clips at native resolution."""

    tower = NativeVisionModule

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        v = self.size.vision
        if v is None:
            return {}
        facts = {"form": "native", "patch_px": v.patch_px, "merge": v.merge, "frames": v.frames}
        return {"vision": {**facts, **dict(v.processing.facts)}}


@dataclass(frozen=True)
class Qwen3VL(NativeModel):
    """The tower and the decoder as a model of the engine's contract."""

    size: Qwen3VLSize
    decoder = DecoderModule

    @property
    def plain(self) -> Mapping[str, Any]:
        modules = super().plain
        taps = len(self.size.vision.deepstack)
        return {**modules, "llm": replace(modules["llm"], deepstack=taps)}

    @property
    def edges(self) -> tuple[Mapping[str, Any], ...]:
        """Edges that put the tower's last features among the LLM's tokens, and add the features of
        its k-th tap there after the LLM's k-th layer."""
        joined = {"source": "vision", "target": "llm"}
        return (
            {**joined, "name": "visual"},
            *(
                {**joined, "name": name, "tap": name, "enters": i + 1}
                for i, name in enumerate(self.plain["vision"].taps)
            ),
        )

    @property
    def weights(self) -> HfWeightMap:
        """The weight map of a checkpoint of transformers."""
        return hf.qwen3_vl_weights(self)

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Weight maps of transformers' checkpoints for the parts that are published alone."""
        return {"llm": partial(hf.decoder_weights, self.plain["llm"])}


def build(
    size: str = "qwen3-vl-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Qwen3VL:
    """Build by size ("qwen3-vl-8b", a folder); see `models.composed.build_from_size`."""
    return build_from_size(Qwen3VL, QWEN3_VL_FAMILY, size, dtype, attention_kernel)
