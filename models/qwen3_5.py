"""Qwen3.5 (dense): a tower at native resolution, and a decoder of gated delta nets and gated
attention; or the decoder alone.

Samples are as in `models.qwen3_vl`; only the last layer of the tower feeds the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models import qwen3_5_hf
from models.composed import build_from_size
from models.hf_tensors import HfWeightMap
from models.qwen3_5_decoder import HybridModule
from models.qwen3_5_sizes import QWEN3_5_FAMILY, QWEN3_5_TEXT_FAMILY, Qwen35Size
from models.qwen3_vl import NativeModel


@dataclass(frozen=True)
class Qwen35(NativeModel):
    """See `NativeModel`."""

    size: Qwen35Size
    decoder = HybridModule

    @property
    def weights(self) -> HfWeightMap:
        """The weight map of a checkpoint of transformers."""
        return qwen3_5_hf.weight_map(self.plain, self.size)

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Weight maps of transformers' checkpoints for the parts that are published alone."""
        alone = Qwen35Size(self.size.decoder)
        return {"llm": lambda: qwen3_5_hf.weight_map({"llm": self.plain["llm"]}, alone)}


def build(
    size: str = "qwen3.5-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Qwen35:
    """Build by size ("qwen3.5-9b", a folder) for pictures, clips and text."""
    read = qwen3_5_hf.read_qwen3_5
    return build_from_size(Qwen35, QWEN3_5_FAMILY, size, dtype, attention_kernel, read)


def build_text(
    size: str = "qwen3.5-text-nano", dtype: str = "float32", attention_kernel: str = "auto"
) -> Qwen35:
    """Build a text-only model by size (a folder); see `models.composed.build_from_size`."""
    read = qwen3_5_hf.read_qwen3_5_text
    return build_from_size(Qwen35, QWEN3_5_TEXT_FAMILY, size, dtype, attention_kernel, read)
