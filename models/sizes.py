"""Every model size, stated once.

Published sizes are those of the models' `config.json` (the Instruct variants where Qwen2.5's
differ); `siglip-1b` and `siglip-6b` are the scaled towers of DFLOP's public code
(arXiv 2603.25120). `nano` is for tests, `tiny` trains on a CPU in minutes; `tiny+tiny-short` takes
about as long in the encoder as in the LLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

Tower = TypeVar("Tower")
Size = TypeVar("Size")


@dataclass(frozen=True)
class VisionSize:
    """A vision tower and how its output grid becomes visual tokens.

    `form` is "siglip", or "internvit": a class token (dropped by the connector), layer scale, and
    a norm of the merged features. `merge` x `merge` neighbouring patches become one visual token
    (their features side by side). `post_norm` says whether a LayerNorm follows the last layer;
    LLaVA-OneVision takes the hidden states without it. `qkv_bias`, `qk_norm` (over all heads) and
    `rms_norm` (instead of LayerNorm) are choices of the internvit form.
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
    form: Literal["siglip", "internvit"] = "siglip"
    qkv_bias: bool = True
    qk_norm: bool = False
    rms_norm: bool = False

    def __post_init__(self) -> None:
        if self.width % self.n_heads or self.grid % self.merge:
            raise ValueError(f"width must divide by n_heads and the patch grid by merge: {self}")
        if self.form == "siglip" and (not self.qkv_bias or self.qk_norm or self.rms_norm):
            raise ValueError(f"the siglip form has query biases, LayerNorm and no QK norm: {self}")

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
    def tokens_in_tower(self) -> int:
        """Patches and, in the internvit form, the class token."""
        return self.patches_per_tile + (self.form == "internvit")

    @property
    def tokens_per_tile(self) -> int:
        return (self.grid // self.merge) ** 2


@dataclass(frozen=True)
class AudioSize:
    """A Whisper-form encoder: chunks of `frames` mel frames, of which `mel_frames` may be real.

    The conv stem halves the frames, an average over two the positions: a chunk gives
    frames / 4 tokens.
    """

    frames: int
    mel_bins: int
    width: int
    n_layers: int
    n_heads: int
    mlp: int
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % self.n_heads or self.width % 2 or self.frames % 4:
            raise ValueError(f"width must divide by n_heads and 2, and frames by 4: {self}")

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads

    @property
    def positions(self) -> int:
        return self.frames // 2

    @property
    def tokens_per_chunk(self) -> int:
        return self.frames // 4


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


# How a picture becomes tiles and LLM tokens: a grid and an overview with their features as they
# are, LLaVA-OneVision's unpadded and downscaled grid with line ends, or InternVL's tiling.
Layout = Literal["tiles", "anyres", "dynamic"]


@dataclass(frozen=True)
class LlavaSize:
    """A vision tower joined to a decoder by a two-layer MLP as wide as the decoder."""

    vision: VisionSize
    decoder: DecoderSize
    layout: Layout = "tiles"

    def __post_init__(self) -> None:
        if self.layout == "anyres" and self.vision.merge != 1:
            raise ValueError(f"the anyres layout needs a token for each patch: {self.vision}")


@dataclass(frozen=True)
class Qwen2AudioSize:
    """A Whisper-form encoder joined to a decoder by one linear layer."""

    audio: AudioSize
    decoder: DecoderSize


@dataclass(frozen=True)
class OmniSize:
    """A vision tower and a Whisper-form encoder, both joined to one decoder; of a sound so many
    windows are heard."""

    vision: VisionSize
    audio: AudioSize
    decoder: DecoderSize
    layout: Layout = "tiles"
    max_windows: int = 16


def _internvit(
    width: int, n_layers: int, n_heads: int, mlp: int, tile_px: int = 448, **choices: bool
) -> VisionSize:
    patch_px = 14 if tile_px == 448 else 8
    return VisionSize(
        tile_px,
        patch_px,
        width,
        n_layers,
        n_heads,
        mlp,
        merge=2,
        post_norm=False,
        form="internvit",
        **choices,
    )


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
    "internvit-nano": _internvit(32, 2, 4, 64, tile_px=32),
    "internvit-300m": _internvit(1024, 24, 16, 4096),
    "internvit-6b": _internvit(3200, 45, 25, 12800, qkv_bias=False, qk_norm=True, rms_norm=True),
}

AUDIO: Mapping[str, AudioSize] = {
    "whisper-nano": AudioSize(32, 8, 32, 2, 4, 64),
    "whisper-tiny": AudioSize(200, 32, 64, 4, 4, 256),
    "whisper-large-v3": AudioSize(3000, 128, 1280, 32, 20, 5120),
}

DECODERS: Mapping[str, DecoderSize] = {
    "nano": DecoderSize(32, 4, 4, 2, 96, 512, rope_theta=1e4, tied=True),
    "tiny": DecoderSize(128, 8, 4, 2, 384, 512, rope_theta=1e4, tied=True),
    "tiny-short": DecoderSize(128, 3, 4, 2, 384, 512, rope_theta=1e4, tied=True),
    # Qwen2-Audio's: Qwen-7B with biases, and a vocabulary with audio tokens.
    "qwen-7b": DecoderSize(4096, 32, 32, 32, 11008, 156032, rope_theta=1e4, norm_eps=1e-5),
    "qwen2.5-0.5b": DecoderSize(896, 24, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": DecoderSize(1536, 28, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": DecoderSize(2048, 36, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": DecoderSize(3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-32b": DecoderSize(5120, 64, 40, 8, 27648, 152064),
    "qwen2.5-72b": DecoderSize(8192, 80, 64, 8, 29568, 152064),
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
}


def _unmerged(size: VisionSize) -> VisionSize:
    return dataclasses.replace(size, merge=1, post_norm=False)


# LLaVA-OneVision drops SigLIP's last layer and its final norm (released weights: 26 layers).
_LLAVA_OV_VISION = dataclasses.replace(VISION["siglip-so400m"], n_layers=26, post_norm=False)

SIZES: Mapping[str, LlavaSize] = {
    "nano": LlavaSize(VISION["nano"], DECODERS["nano"]),
    "tiny": LlavaSize(VISION["tiny"], DECODERS["tiny"]),
    "anyres-nano": LlavaSize(_unmerged(VISION["nano"]), DECODERS["nano"], "anyres"),
    **{
        f"llava-ov-{name.removeprefix('qwen2.5-')}": LlavaSize(_LLAVA_OV_VISION, decoder, "anyres")
        for name, decoder in DECODERS.items()
        if name.startswith(("qwen2.5-", "llama3-"))
    },
}


def _internvl(vision: str, decoder: str) -> LlavaSize:
    # InternVL-2.5 adds image tokens to Qwen2.5's vocabulary and unties the head.
    larger = dataclasses.replace(DECODERS[decoder], vocab=151674, tied=False)
    return LlavaSize(VISION[vision], larger, "dynamic")


# The InternVL-2.5 models whose LLM is Qwen2.5 (the others have InternLM2.5).
INTERNVL: Mapping[str, LlavaSize] = {
    "internvl-nano": LlavaSize(VISION["internvit-nano"], DECODERS["nano"], "dynamic"),
    "internvl-2.5-1b": _internvl("internvit-300m", "qwen2.5-0.5b"),
    "internvl-2.5-4b": _internvl("internvit-300m", "qwen2.5-3b"),
    "internvl-2.5-38b": _internvl("internvit-6b", "qwen2.5-32b"),
    "internvl-2.5-78b": _internvl("internvit-6b", "qwen2.5-72b"),
}


def _qwen2_audio(audio: str, decoder: str) -> Qwen2AudioSize:
    # The reference never ties the head.
    return Qwen2AudioSize(AUDIO[audio], dataclasses.replace(DECODERS[decoder], tied=False))


QWEN2_AUDIO: Mapping[str, Qwen2AudioSize] = {
    "qwen2-audio-nano": _qwen2_audio("whisper-nano", "nano"),
    "qwen2-audio-tiny": _qwen2_audio("whisper-tiny", "tiny"),
    "qwen2-audio-7b": Qwen2AudioSize(AUDIO["whisper-large-v3"], DECODERS["qwen-7b"]),
}


OMNI: Mapping[str, OmniSize] = {
    "omni-nano": OmniSize(VISION["nano"], AUDIO["whisper-nano"], DECODERS["nano"]),
    "omni-tiny": OmniSize(VISION["tiny"], AUDIO["whisper-tiny"], DECODERS["tiny"]),
    "omni-7b": OmniSize(
        _LLAVA_OV_VISION, AUDIO["whisper-large-v3"], DECODERS["qwen2.5-7b"], "anyres"
    ),
}


def _find(
    name: str,
    known: Mapping[str, Size],
    towers: Mapping[str, Tower],
    join: Callable[[Tower, DecoderSize], Size],
) -> Size:
    """The composition called `name`, or TOWER+DECODER for any two rows of the tables."""
    if name in known:
        return known[name]
    tower, plus, decoder = name.partition("+")
    if plus and tower in towers and decoder in DECODERS:
        return join(towers[tower], DECODERS[decoder])
    raise ValueError(
        f"unknown model size {name!r}; known: {', '.join(known)}; or TOWER+DECODER of "
        f"{', '.join(towers)} and {', '.join(DECODERS)}"
    )


def find(name: str) -> LlavaSize:
    """A LLaVA-form size by name, or TOWER+DECODER.

    Raises:
      ValueError: no such size; the message lists the known ones.
    """
    return _find(name, SIZES, _of_form("siglip"), LlavaSize)


def find_internvl(name: str) -> LlavaSize:
    """An InternVL size by name, or TOWER+DECODER; ValueError as for `find`."""
    return _find(name, INTERNVL, _of_form("internvit"), partial(LlavaSize, layout="dynamic"))


def find_qwen2_audio(name: str) -> Qwen2AudioSize:
    """A Qwen2-Audio size by name, or TOWER+DECODER; ValueError as for `find`."""
    return _find(name, QWEN2_AUDIO, AUDIO, Qwen2AudioSize)


def find_omni(name: str) -> OmniSize:
    """A size of three modules by name, or VISION+AUDIO+DECODER; ValueError as for `find`."""
    vision, _, rest = name.partition("+")
    audio, _, decoder = rest.partition("+")
    if name in OMNI:
        return OMNI[name]
    if vision in VISION and audio in AUDIO and decoder in DECODERS:
        layout: Layout = "dynamic" if VISION[vision].form == "internvit" else "tiles"
        return OmniSize(VISION[vision], AUDIO[audio], DECODERS[decoder], layout)
    raise ValueError(
        f"unknown model size {name!r}; known: {', '.join(OMNI)}; or VISION+AUDIO+DECODER of "
        f"{', '.join(VISION)}; {', '.join(AUDIO)}; {', '.join(DECODERS)}"
    )


def _of_form(form: str) -> dict[str, VisionSize]:
    return {name: size for name, size in VISION.items() if size.form == form}
