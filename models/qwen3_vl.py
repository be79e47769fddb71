"""Qwen3-VL (arXiv 2511.21631), dense: a tower at native resolution, DeepStack, a Qwen3 decoder.

What the modules read, as samples have to give it:

"vision": a piece is a picture, or a pair of consecutive frames of a clip, at its own resolution:
rows x columns patches of 16 x 16 pixels, both even. A picture is a pair of itself twice. A clip's
pairs are pieces of their own, in order of time; they do not see each other. Patches of a piece go
block by block, a block being 2 x 2 neighbouring patches: blocks in row order, and in a block
(top left, top right, bottom left, bottom right). Of every patch:
- patches uint8 [3 * 2 * 16 * 16], flattened (colour, frame, row, column): pixels as they come from
  the resizing; the tower normalises them to -1 to 1.
- grid int32 [4]: the patch's row and column, and the rows and columns of its piece's grid, all
  counted in patches.
A piece of p patches gives p / 4 features, one for each block, in order.

"llm": a piece is a sample's sequence of tokens. Features of "vision" stand at the placeholders
(`is_visual`), copied one to one in the order of the sample's pieces. Beside the fields of other
decoders (tokens, targets, weights, is_visual) a sample gives
- positions int32 [3]: time, row, column. A token of text has the same number three times, one more
  than the largest before it, from 0. The placeholders of a piece that begins at n have
  (n, n + row, n + column) of their block, rows and columns counted in blocks; what follows it goes
  on at n + max(rows, columns). Time stamps of a clip's pairs are text between its pieces.
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
        """The tower's last features stand among the LLM's tokens; those of the k-th of its taps
        are added there after the LLM's k-th layer."""
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
        """Where a checkpoint of transformers has the model's parameters."""
        return hf.qwen3_vl_weights(self)

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Where checkpoints of transformers have the parts that are published alone."""
        return {"llm": partial(hf.decoder_weights, self.plain["llm"])}


def build(
    size: str = "qwen3-vl-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Qwen3VL:
    """A model by size ("qwen3-vl-8b", a folder); see `models.composed.build_from_size`."""
    return build_from_size(Qwen3VL, QWEN3_VL_FAMILY, size, dtype, attention_kernel)
