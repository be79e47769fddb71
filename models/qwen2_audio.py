"""Qwen2-Audio (arXiv 2407.10759): a Whisper-form encoder, a linear connector and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models import hf
from models.attention import known_kernel
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.hf_sizes import folder_size
from models.hf_tensors import WeightMap
from models.llava import known_dtype
from models.sizes import Qwen2AudioSize, find_qwen2_audio


@dataclass(frozen=True)
class Qwen2Audio:
    """Modules in topological order and what the data must look like."""

    size: Qwen2AudioSize
    dtype: jnp.dtype
    attention_kernel: str = "auto"

    @property
    def modules(self) -> Mapping[str, AudioModule | DecoderModule]:
        audio, decoder, kernel = self.size.audio, self.size.decoder, self.attention_kernel
        return {
            "audio": AudioModule(audio, decoder.width, self.dtype, kernel),
            "llm": DecoderModule(decoder, self.dtype, kernel),
        }

    @property
    def mel_bins(self) -> int:
        return self.size.audio.mel_bins

    @property
    def frames_per_chunk(self) -> int:
        return self.size.audio.frames

    @property
    def tokens_per_chunk(self) -> int:
        return self.size.audio.tokens_per_chunk

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab

    @property
    def weights(self) -> WeightMap:
        """Where a checkpoint of transformers has the model's parameters."""
        return hf.qwen2_audio(self)


def build(
    size: str = "qwen2-audio-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> Qwen2Audio:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "qwen2-audio-7b", TOWER+DECODER, or a folder with a
        config.json of transformers.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.
      attention_kernel: "auto" (by platform), "xla" or "pallas"; see `models.attention`.

    Raises:
      ValueError: unknown size, dtype or kernel; the message lists the known ones.
    """
    found = folder_size(size, "qwen2_audio") or find_qwen2_audio(size)
    return Qwen2Audio(found, known_dtype(dtype), known_kernel(attention_kernel))
