"""InternVL-2.5 (arXiv 2412.05271): an InternViT tower, pixel shuffle, an MLP and a decoder."""

from __future__ import annotations

from models.hf_sizes import folder_size
from models.llava import Llava, known_dtype
from models.sizes import find_internvl


def build(size: str = "internvl-nano", dtype: str = "float32") -> Llava:
    """The model of a named size (see `models.sizes`).

    Args:
      size: a composition such as "internvl-2.5-4b", TOWER+DECODER, or a folder with a
        config.json of transformers.
      dtype: compute dtype, "float32" or "bfloat16"; parameters are float32.

    Raises:
      ValueError: unknown size or dtype; the message lists the known ones.
    """
    return Llava(folder_size(size, "internvl") or find_internvl(size), known_dtype(dtype))
