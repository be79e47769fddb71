"""Qwen2-Audio (arXiv 2407.10759): a Whisper-form encoder, a linear connector and a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models import hf
from models.attention import known_kernel
from models.audio import AudioModule
from models.composed import Composed, known_dtype
from models.decoder import DecoderModule
from models.hf_sizes import folder_size
from models.hf_tensors import WeightMap
from models.media import audio_facts
from models.sizes import Qwen2AudioSize, find_qwen2_audio

MAX_WINDOWS = 1  # of a longer sound; the reference hears the first


@dataclass(frozen=True)
class Qwen2Audio(Composed):
    """See `Composed`."""

    size: Qwen2AudioSize

    @property
    def modules(self) -> Mapping[str, AudioModule | DecoderModule]:
        return {"audio": self._audio(), "llm": self._llm()}

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        return {"audio": audio_facts(self.size.audio, MAX_WINDOWS)}

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
    return Qwen2Audio(found, known_dtype(dtype), attention_kernel=known_kernel(attention_kernel))
