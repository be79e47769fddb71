"""Pictures, clips and audio in one model: two encoders side by side and one decoder."""

from __future__ import annotations

from models.composed import Composition, build_from_size
from models.sizes import OMNI_FAMILY


def build(
    size: str = "omni-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Composition:
    """Build by size ("omni-tiny", VISION+AUDIO+DECODER); see `composed.build_from_size`."""
    return build_from_size(Composition, OMNI_FAMILY, size, dtype, attention_kernel)
