"""Every model size, stated once.

Published sizes are those of the models' `config.json` (the Instruct variants where Qwen2.5's
differ); `siglip-1b` and `siglip-6b` are the scaled towers of DFLOP's public code
(arXiv 2603.25120). `nano` is for tests, `tiny` trains on a CPU in minutes; `tiny+tiny-short` takes
about as long in the encoder as in the LLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VisionSize:
    """A SigLIP-form vision tower and how its output grid becomes visual tokens.

    `merge` x `merge` neighbouring patches become one visual token (their features side by side).
    `post_norm` says whether a LayerNorm follows the last layer; LLaVA-OneVision takes the hidden
    states without it.
    """

    tile_px: int
    patch_px: int
    width: int
    n_layers: int
    n_heads: int
    mlp: int
    merge: int = 1
    post_norm: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.width % self.n_heads or self.grid % self.merge:
            raise ValueError(f"width must divide by n_heads and the patch grid by merge: {self}")

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads

    @property
    def grid(self) -> int:
        """Patches along a side; pixels beyond the last whole patch are not looked at."""
        return self.tile_px // self.patch_px

    @property
    def patches_per_tile(self) -> int:
        return self.grid**2

    @property
    def tokens_per_tile(self) -> int:
        return (self.grid // self.merge) ** 2


@dataclass(frozen=True)
class DecoderSize:
    """A decoder of Llama-3 form, or Qwen2.5 form with `qkv_bias`; `tied` shares embedding and head.

    `logits_elements` bounds the float32 logits (tokens x vocab) alive at once in the loss.
    """

    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    mlp: int
    vocab: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    tied: bool = False
    logits_elements: int = 2**27

    def __post_init__(self) -> None:
        even_heads = self.width % self.n_heads == 0 and self.head_dim % 2 == 0
        if not even_heads or self.n_heads % self.n_kv_heads:
            raise ValueError(f"heads must divide width (evenly) and kv heads the heads: {self}")

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads


@dataclass(frozen=True)
class LlavaSize:
    """A vision tower joined to a decoder by a two-layer MLP as wide as the decoder."""

    vision: VisionSize
    decoder: DecoderSize


def _llama3(width: int, n_layers: int, n_heads: int, mlp: int) -> DecoderSize:
    return DecoderSize(
        width, n_layers, n_heads, 8, mlp, 128256, rope_theta=5e5, norm_eps=1e-5, qkv_bias=False
    )


VISION: Mapping[str, VisionSize] = {
    "nano": VisionSize(32, 8, 32, 2, 4, 64, merge=2),
    "tiny": VisionSize(48, 8, 64, 4, 4, 256, merge=2),
    "siglip-so400m": VisionSize(384, 14, 1152, 27, 16, 4304),
    "siglip-1b": VisionSize(384, 14, 1728, 27, 32, 6912),
    "siglip-6b": VisionSize(384, 14, 2304, 40, 48, 8608),
}

DECODERS: Mapping[str, DecoderSize] = {
    "nano": DecoderSize(32, 4, 4, 2, 96, 512, rope_theta=1e4, tied=True),
    "tiny": DecoderSize(128, 8, 4, 2, 384, 512, rope_theta=1e4, tied=True),
    "tiny-short": DecoderSize(128, 3, 4, 2, 384, 512, rope_theta=1e4, tied=True),
    "qwen2.5-0.5b": DecoderSize(896, 24, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": DecoderSize(1536, 28, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": DecoderSize(2048, 36, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": DecoderSize(3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-32b": DecoderSize(5120, 64, 40, 8, 27648, 152064),
    "qwen2.5-72b": DecoderSize(8192, 80, 64, 8, 29568, 152064),
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
}

# LLaVA-OneVision drops SigLIP's last layer and its final norm (released weights: 26 layers).
_LLAVA_OV_VISION = dataclasses.replace(VISION["siglip-so400m"], n_layers=26, post_norm=False)

SIZES: Mapping[str, LlavaSize] = {
    "nano": LlavaSize(VISION["nano"], DECODERS["nano"]),
    "tiny": LlavaSize(VISION["tiny"], DECODERS["tiny"]),
    **{
        f"llava-ov-{name.removeprefix('qwen2.5-')}": LlavaSize(_LLAVA_OV_VISION, decoder)
        for name, decoder in DECODERS.items()
        if name.startswith(("qwen2.5-", "llama3-"))
    },
}


def find(name: str) -> LlavaSize:
    """The composition called `name`, or VISION+DECODER for any two rows of the tables.

    Raises:
      ValueError: no such size; the message lists the known ones.
    """
    if name in SIZES:
        return SIZES[name]
    vision, plus, decoder = name.partition("+")
    if plus and vision in VISION and decoder in DECODERS:
        return LlavaSize(VISION[vision], DECODERS[decoder])
    raise ValueError(
        f"unknown model size {name!r}; known: {', '.join(SIZES)}; or VISION+DECODER of "
        f"{', '.join(VISION)} and {', '.join(DECODERS)}"
    )
