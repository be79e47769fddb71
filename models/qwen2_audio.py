"""Qwen2-Audio (arXiv 2407.10759): a Whisper-form encoder, a linear connector and a decoder."""

from __future__ import annotations

from models.composed import PublishedComposition, build_from_size
from models.sizes import QWEN2_AUDIO_FAMILY


def build(
    size: str = "qwen2-audio-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> PublishedComposition:
    """Build by size ("qwen2-audio-7b", TOWER+DECODER, a folder); see `composed.build_from_size`."""
    return build_from_size(PublishedComposition, QWEN2_AUDIO_FAMILY, size, dtype, attention_kernel)
