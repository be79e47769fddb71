"""LLaVA-style models: a SigLIP tower, a connector and a decoder."""

from __future__ import annotations

from models.composed import PublishedComposition, build_from_size
from models.sizes import LLAVA_FAMILY


def build(
    size: str = "tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> PublishedComposition:
    """Build by size ("llava-ov-7b", TOWER+DECODER, a folder); see `composed.build_from_size`."""
    return build_from_size(PublishedComposition, LLAVA_FAMILY, size, dtype, attention_kernel)
