"""LLaVA-form models: a vision tower, a connector and a decoder, as the engine's model contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models import hf
from models.attention import known_kernel
from models.composed import Composed, known_dtype
from models.decoder import DecoderModule
from models.hf_sizes import folder_size
from models.hf_tensors import WeightMap
from models.media import vision_facts
from models.sizes import LlavaSize, find
from models.vit import VisionModule


@dataclass(frozen=True)
class Llava(Composed):
    """See `Composed`."""

    size: LlavaSize

    @property
    def modules(self) -> Mapping[str, VisionModule | DecoderModule]:
        return {"vision": self._vision(), "llm": self._llm(self.size.layout == "anyres")}

    @property
    def tile_px(self) -> int:
        return self.size.vision.tile_px

    @property
    def tokens_per_tile(self) -> int:
        return self.size.vision.tokens_per_tile

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        return {"vision": vision_facts(self.size.vision, self.size.layout)}

    @property
    def weights(self) -> WeightMap:
        """Where a checkpoint of transformers has the model's parameters."""
        return (
            hf.internvl(self) if self.size.vision.form == "internvit" else hf.llava_onevision(self)
        )


def build(size: str = "tiny", dtype: str = "float32", attention_kernel: str = "auto") -> Llava:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "tiny" or "llava-ov-7b", TOWER+DECODER, or a folder
        with a config.json of transformers.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.
      attention_kernel: "auto" (by platform), "xla" or "pallas"; see `models.attention`.

    Raises:
      ValueError: unknown size, dtype or kernel; the message lists the known ones.
    """
    found = folder_size(size, "llava_onevision") or find(size)
    return Llava(found, known_dtype(dtype), attention_kernel=known_kernel(attention_kernel))
