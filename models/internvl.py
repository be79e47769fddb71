"""InternVL-2.5 (arXiv 2412.05271): an InternViT tower, pixel shuffle, an MLP and a decoder."""

from __future__ import annotations

from models.attention import known_kernel
from models.composed import known_dtype
from models.hf_sizes import folder_size
from models.llava import Llava
from models.sizes import find_internvl


def build(
    size: str = "internvl-nano", dtype: str = "float32", attention_kernel: str = "auto"
) -> Llava:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "internvl-2.5-4b", TOWER+DECODER, or a folder with a
        config.json of transformers.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.
      attention_kernel: "auto" (by platform), "xla" or "pallas"; see `models.attention`.

    Raises:
      ValueError: unknown size, dtype or kernel; the message lists the known ones.
    """
    found = folder_size(size, "internvl") or find_internvl(size)
    return Llava(found, known_dtype(dtype), attention_kernel=known_kernel(attention_kernel))
