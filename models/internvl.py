"""InternVL-2.5 (arXiv 2412.05271): an InternViT tower, pixel shuffle, an MLP and a decoder."""

from __future__ import annotations

from models.composed import PublishedComposition, build_from_size
from models.sizes import INTERNVL_FAMILY


def build(
    size: str = "internvl-nano", dtype: str = "float32", attention_kernel: str = "auto"
) -> PublishedComposition:
    """Build by size ("internvl-2.5-4b", TOWER+DECODER, folder); see `composed.build_from_size`."""
    return build_from_size(PublishedComposition, INTERNVL_FAMILY, size, dtype, attention_kernel)
