"""Qwen2-Audio (arXiv 2407.10759): a Whisper-form encoder, a linear connector and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from models import hf
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.hf_sizes import folder_size
from models.hf_tensors import WeightMap
from models.llava import known_dtype
from models.lora import Lora
from models.sizes import Qwen2AudioSize, find_qwen2_audio


@dataclass(frozen=True)
class Qwen2Audio:
    """Modules in topological order and what the data must look like."""

    size: Qwen2AudioSize
    dtype: jnp.dtype
    lora: Lora | None = None

    @property
    def modules(self) -> Mapping[str, AudioModule | DecoderModule]:
        audio, decoder = self.size.audio, self.size.decoder
        return {
            "audio": AudioModule(audio, decoder.width, self.dtype),
            "llm": DecoderModule(decoder, self.dtype, self.lora),
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

    def with_lora(self, rank: int, alpha: float) -> Qwen2Audio:
        """The model with low-rank adapters on the LLM's matrices."""
        return replace(self, lora=Lora(rank, alpha))

    @property
    def weights(self) -> WeightMap:
        """Where a checkpoint of transformers has the model's parameters."""
        return hf.qwen2_audio(self)


def build(size: str = "qwen2-audio-tiny", dtype: str = "float32") -> Qwen2Audio:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "qwen2-audio-7b", TOWER+DECODER, or a folder with a
        config.json of transformers.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.

    Raises:
      ValueError: unknown size or dtype; the message lists the known ones.
    """
    found = folder_size(size, "qwen2_audio") or find_qwen2_audio(size)
    return Qwen2Audio(found, known_dtype(dtype))
