"""Pictures, clips and sound in one model: two encoders side by side and one decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.attention import known_kernel
from models.audio import AudioModule
from models.composed import Composed, known_dtype
from models.decoder import DecoderModule
from models.media import audio_facts, vision_facts
from models.sizes import OmniSize, find_omni
from models.vit import VisionModule


@dataclass(frozen=True)
class Omni(Composed):
    """See `Composed`."""

    size: OmniSize

    @property
    def modules(self) -> Mapping[str, VisionModule | AudioModule | DecoderModule]:
        return {
            "vision": self._vision(),
            "audio": self._audio(),
            "llm": self._llm(self.size.layout == "anyres"),
        }

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        s = self.size
        return {
            "vision": vision_facts(s.vision, s.layout),
            "audio": audio_facts(s.audio, s.max_windows),
        }


def build(size: str = "omni-tiny", dtype: str = "float32", attention_kernel: str = "auto") -> Omni:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "omni-tiny", or VISION+AUDIO+DECODER.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.
      attention_kernel: "auto" (by platform), "xla" or "pallas"; see `models.attention`.

    Raises:
      ValueError: unknown size or dtype; the message lists the known ones.
    """
    kernel = known_kernel(attention_kernel)
    return Omni(find_omni(size), known_dtype(dtype), attention_kernel=kernel)
