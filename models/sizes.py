"""Table of all model sizes.

Published sizes are those of the models' `config.json` (of the Instruct variants if Qwen2.5's
differ); `siglip-1b` and `siglip-6b` are the scaled towers of DFLOP's public code (arXiv
2603.25120). `nano` is for tests, `tiny` trains on a CPU in minutes; `tiny-deep+tiny-short` takes
about as long in the encoder as in the LLM, `tiny+tiny-short` three quarters of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.processors import Processing


@dataclass(frozen=True)
class VisionSize:
    """A vision tower, and how its output grid becomes visual tokens.

    `form` is "siglip", or "internvit": a class token (dropped by the connector), layer scale, and a
    norm of the merged features. `merge` x `merge` neighbouring patches become one visual token that
    concatenates their features. `post_norm`: whether a LayerNorm follows the last layer;
    LLaVA-OneVision uses hidden states without it. `qkv_bias`, `qk_norm` (over all heads) and
    `rms_norm` (instead of LayerNorm) are options of the internvit form. `processing`: from a
    folder's processors; None: as published for the form.
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
    processing: Processing | None = None

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
        """Patches along a side; pixels after the last whole patch are ignored."""
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
    """A Whisper encoder over chunks of `frames` mel frames; the first `mel_frames` are real.

    The conv stem halves the frames, an average halves the positions: a chunk becomes frames / 4
    tokens. `facts`: from a folder's feature extractor, for the preparation of data.
    """

    frames: int
    mel_bins: int
    width: int
    n_layers: int
    n_heads: int
    mlp: int
    norm_eps: float = 1e-5
    facts: tuple[tuple[str, Any], ...] = ()

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
    """A decoder in the form of Llama-3, of Qwen2.5 with `qkv_bias`, or of Qwen3 with `qk_norm` per
    head; `tied` shares embedding and head.

    `head_size`: size of a head, 0: width / n_heads. With `mrope_sections` a token has three
    positions, and each rotates this number of a head's pairs. `logits_elements` limits the float32
    logits (tokens x vocab) in memory in the loss.
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
    logits_elements: int = 2**28
    qk_norm: bool = False
    head_size: int = 0
    mrope_sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        even_heads = self.head_dim % 2 == 0 and (self.head_size or self.width % self.n_heads == 0)
        if not even_heads or self.n_heads % self.n_kv_heads:
            raise ValueError(f"heads must divide width (evenly) and kv heads the heads: {self}")
        if self.qkv_bias and self.qk_norm:
            raise ValueError(f"a decoder has query biases or QK norm, not both: {self}")
        if self.mrope_sections:
            half = self.rotary_pairs
            # Sections take turns in every three pairs, so the last pair of each must exist.
            lasts = [3 * (n - 1) + i for i, n in enumerate(self.mrope_sections) if i and n > 0]
            fits = sum(self.mrope_sections) == half and max(lasts, default=0) < half
            if len(self.mrope_sections) != 3 or min(self.mrope_sections) < 0 or not fits:
                raise ValueError(
                    f"mrope_section {list(self.mrope_sections)} must be three numbers with the sum "
                    f"{half}, a head's rotated pairs, the last two each at most about a third of it"
                )

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.n_heads

    @property
    def norm_offset(self) -> float:
        """Offset that norms add to their learnt scale."""
        return 0.0

    @property
    def rotary_pairs(self) -> int:
        """Pairs of a head's coordinates that are rotated by the token's position."""
        return self.head_dim // 2


# How a picture becomes tiles and LLM tokens: "tiles" are a grid and an overview, "anyres" is
# LLaVA-OneVision's unpadded and downscaled grid with line ends, "dynamic" is InternVL's tiling.
TileLayout = Literal["tiles", "anyres", "dynamic"]


@dataclass(frozen=True)
class ModelSize:
    """A decoder and its encoders: a vision tower with a two-layer MLP as wide as the decoder, a
    Whisper encoder with one linear layer, or both. Of a long audio, `max_windows` windows are used
    (Qwen2-Audio uses the first)."""

    decoder: DecoderSize
    vision: VisionSize | None = None
    audio: AudioSize | None = None
    layout: TileLayout = "tiles"
    max_windows: int = 1

    def __post_init__(self) -> None:
        if self.layout == "anyres" and self.vision and self.vision.merge != 1:
            raise ValueError(f"the anyres layout needs a token for each patch: {self.vision}")


def _internvit(
    width: int, n_layers: int, n_heads: int, mlp: int, tile_px: int = 448, **choices: Any
) -> VisionSize:
    patch_px = 14 if tile_px == 448 else 8
    form: Any = {"merge": 2, "post_norm": False, "form": "internvit"}
    return VisionSize(tile_px, patch_px, width, n_layers, n_heads, mlp, **form, **choices)


def _llama3(width: int, n_layers: int, n_heads: int, mlp: int) -> DecoderSize:
    return DecoderSize(
        width, n_layers, n_heads, 8, mlp, 128256, rope_theta=5e5, norm_eps=1e-5, qkv_bias=False
    )


VISION: Mapping[str, VisionSize] = {
    "nano": VisionSize(32, 8, 32, 2, 4, 64, merge=2),
    "tiny": VisionSize(48, 8, 64, 4, 4, 256, merge=2),
    "tiny-deep": VisionSize(48, 8, 64, 6, 4, 256, merge=2),
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

LLAVA: Mapping[str, ModelSize] = {
    "nano": ModelSize(DECODERS["nano"], VISION["nano"]),
    "tiny": ModelSize(DECODERS["tiny"], VISION["tiny"]),
    "anyres-nano": ModelSize(DECODERS["nano"], _unmerged(VISION["nano"]), layout="anyres"),
    **{
        f"llava-ov-{name.removeprefix('qwen2.5-')}": ModelSize(
            decoder, _LLAVA_OV_VISION, layout="anyres"
        )
        for name, decoder in DECODERS.items()
        if name.startswith(("qwen2.5-", "llama3-"))
    },
}


def _internvl(vision: str, decoder: str) -> ModelSize:
    # InternVL-2.5 adds image tokens to Qwen2.5's vocabulary and unties the head.
    larger = dataclasses.replace(DECODERS[decoder], vocab=151674, tied=False)
    return ModelSize(larger, VISION[vision], layout="dynamic")


# The InternVL-2.5 models whose LLM is Qwen2.5 (the others have InternLM2.5).
INTERNVL: Mapping[str, ModelSize] = {
    "internvl-nano": ModelSize(DECODERS["nano"], VISION["internvit-nano"], layout="dynamic"),
    "internvl-2.5-1b": _internvl("internvit-300m", "qwen2.5-0.5b"),
    "internvl-2.5-4b": _internvl("internvit-300m", "qwen2.5-3b"),
    "internvl-2.5-38b": _internvl("internvit-6b", "qwen2.5-32b"),
    "internvl-2.5-78b": _internvl("internvit-6b", "qwen2.5-72b"),
}


def _qwen2_audio(audio: str, decoder: str) -> ModelSize:
    # The reference never ties the head.
    return ModelSize(dataclasses.replace(DECODERS[decoder], tied=False), audio=AUDIO[audio])


QWEN2_AUDIO: Mapping[str, ModelSize] = {
    "qwen2-audio-nano": _qwen2_audio("whisper-nano", "nano"),
    "qwen2-audio-tiny": _qwen2_audio("whisper-tiny", "tiny"),
    "qwen2-audio-7b": _qwen2_audio("whisper-large-v3", "qwen-7b"),
}

OMNI_WINDOWS = 16
OMNI: Mapping[str, ModelSize] = {
    "omni-nano": ModelSize(
        DECODERS["nano"], VISION["nano"], AUDIO["whisper-nano"], max_windows=OMNI_WINDOWS
    ),
    "omni-tiny": ModelSize(
        DECODERS["tiny"], VISION["tiny"], AUDIO["whisper-tiny"], max_windows=OMNI_WINDOWS
    ),
    "omni-7b": ModelSize(
        DECODERS["qwen2.5-7b"],
        _LLAVA_OV_VISION,
        AUDIO["whisper-large-v3"],
        "anyres",
        OMNI_WINDOWS,
    ),
}


@dataclass(frozen=True)
class SizeFamily:
    """Compositions of one kind: named ones, and tables whose rows can be joined.

    Attributes:
      kind: model_type in a config.json of transformers; "": no folders of this kind exist.
      tables: field of `ModelSize` -> its rows, in the order of ROW+ROW+...; {}: only names.
    """

    kind: str
    sizes: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    max_windows: int = 1

    def find_size(self, name: str) -> Any:
        """Return the composition called `name`, or ROW+ROW+... with a row of each table.

        Raises:
          ValueError: no such size; the message lists the known ones.
        """
        if name in self.sizes:
            return self.sizes[name]
        rows = name.split("+")
        tables = list(self.tables.items())
        if tables and len(rows) == len(tables) and all(r in t for r, (_, t) in zip(rows, tables)):
            sizes_by_field = {field: table[r] for r, (field, table) in zip(rows, tables)}
            form = sizes_by_field["vision"].form if "vision" in sizes_by_field else ""
            layout: TileLayout = "dynamic" if form == "internvit" else "tiles"
            return ModelSize(**sizes_by_field, layout=layout, max_windows=self.max_windows)
        joined = " + ".join(f"({', '.join(table)})" for _, table in tables)
        combinations = f"; or one of each of {joined}" if tables else ""
        raise ValueError(
            f"unknown model size {name!r}; known: {', '.join(self.sizes)}{combinations}"
        )


def _vision_of_form(form: str) -> dict[str, VisionSize]:
    return {name: size for name, size in VISION.items() if size.form == form}


LLAVA_FAMILY = SizeFamily(
    "llava_onevision", LLAVA, {"vision": _vision_of_form("siglip"), "decoder": DECODERS}
)
INTERNVL_FAMILY = SizeFamily(
    "internvl", INTERNVL, {"vision": _vision_of_form("internvit"), "decoder": DECODERS}
)
QWEN2_AUDIO_FAMILY = SizeFamily("qwen2_audio", QWEN2_AUDIO, {"audio": AUDIO, "decoder": DECODERS})
OMNI_FAMILY = SizeFamily(
    "", OMNI, {"vision": VISION, "audio": AUDIO, "decoder": DECODERS}, OMNI_WINDOWS
)
