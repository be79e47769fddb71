"""LLaVA-form models: a SigLIP tower, a connector and a decoder."""

from __future__ import annotations

from models.composed import Published, made
from models.sizes import LLAVA_FAMILY


def build(size: str = "tiny", dtype: str = "float32", attention_kernel: str = "auto") -> Published:
    """A model by size ("llava-ov-7b", TOWER+DECODER, a folder); see `models.composed.made`."""
    return made(Published, LLAVA_FAMILY, size, dtype, attention_kernel)
