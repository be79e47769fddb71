"""Sizes of Wan's diffusion transformer (arXiv 2503.20314), as in the `config.json` that diffusers
publishes; `nano` is for tests, `tiny` trains on a CPU in minutes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from models.hf_config import ConfigRules, config_values, size_fields
from models.sizes import DECODERS, DecoderSize

DIFFUSERS_CLASS = "WanTransformer3DModel"


@dataclass(frozen=True)
class WanSize:
    """A transformer over patches of a clip's latents, conditioned by text.

    Attributes:
      channels: of the latents.
      patch: latents along time, rows and columns in one token.
      text_width: of the text states that it reads; the LLM's states are projected to it.
      freq_dim: number of sines and cosines that encode a time.
      shift: moves the times of training and sampling towards noise: s becomes shift s / (1 + (shift
        - 1) s) (arXiv 2403.03206).
    """

    n_heads: int
    head_dim: int
    n_layers: int
    mlp: int
    channels: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    text_width: int = 4096
    freq_dim: int = 256
    norm_eps: float = 1e-6
    theta: float = 1e4
    shift: float = 5.0

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.head_dim < 6 or self.freq_dim % 2:
            raise ValueError(f"head_dim must be even and at least 6, freq_dim even: {self}")
        if len(self.patch) != 3 or min(self.patch) < 1:
            raise ValueError(f"patch_size {list(self.patch)} must be three numbers above 0")

    @property
    def width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def patch_values(self) -> int:
        """Numbers of a token's patch."""
        return self.channels * prod(self.patch)

    @property
    def rotary_pairs(self) -> tuple[int, int, int]:
        """Pairs of a head's coordinates that are rotated by time, row and column."""
        side = self.head_dim // 6
        return self.head_dim // 2 - 2 * side, side, side


@dataclass(frozen=True)
class TextToVideoSize:
    """An LLM that reads captions, and the generator that it conditions."""

    decoder: DecoderSize
    generator: WanSize


WAN: Mapping[str, WanSize] = {
    "wan-nano": WanSize(2, 16, 2, 64, channels=4, text_width=24, freq_dim=16),
    "wan-tiny": WanSize(4, 32, 4, 512, channels=48, patch=(1, 1, 1), text_width=128, freq_dim=64),
    "wan2.1-1.3b": WanSize(12, 128, 30, 8960),
    "wan2.1-14b": WanSize(40, 128, 40, 13824),
    "wan2.2-5b": WanSize(24, 128, 30, 14336, channels=48),
}

# diffusers' defaults of absent keys that affect the computation
CONFIG_RULES = ConfigRules(
    {
        "_class_name": DIFFUSERS_CLASS, "patch_size": [1, 2, 2], "num_attention_heads": 40,
        "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096,
        "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "image_dim": None,
        "added_kv_proj_dim": None, "pos_embed_seq_len": None,
    },
    {},
)  # fmt: skip
# Fields of a size, and their config keys.
CONFIG_KEYS = {
    "n_heads": "num_attention_heads", "head_dim": "attention_head_dim", "n_layers": "num_layers",
    "mlp": "ffn_dim", "channels": "in_channels", "text_width": "text_dim", "freq_dim": "freq_dim",
    "norm_eps": "eps",
}  # fmt: skip


def wan_config(size: WanSize) -> dict[str, Any]:
    """Return the config.json from which diffusers reads a size."""
    return {
        "_class_name": DIFFUSERS_CLASS,
        **config_values(size, CONFIG_KEYS),
        "patch_size": list(size.patch),
        "out_channels": size.channels,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "image_dim": None,
        "added_kv_proj_dim": None,
    }


def read_config(config: Mapping[str, Any]) -> WanSize:
    """Return the size in a config.json.

    Raises:
      ValueError: a transformer of another form, such as one conditioned by pictures.
    """
    values = CONFIG_RULES.read(config)
    size = WanSize(patch=tuple(values["patch_size"]), **size_fields(values, CONFIG_KEYS))
    if wrong := CONFIG_RULES.mismatches(config, wan_config(size)):
        key, theirs, ours = wrong[0]
        raise ValueError(f"{key} is {theirs!r}, text to video of this form has {ours!r}")
    return size


def find_size(name: str) -> TextToVideoSize:
    """Return the composition DECODER+GENERATOR; a generator is a size or a folder with config.json.

    Raises:
      ValueError: an unknown size (the message lists the known ones), or a folder of another model.
    """
    decoder, _, generator = name.partition("+")
    file = Path(generator) / "config.json"
    is_generator = generator in WAN or (generator != "" and file.is_file())
    if decoder not in DECODERS or not is_generator:
        raise ValueError(
            f"unknown model size {name!r}; give one of ({', '.join(DECODERS)}) + one of "
            f"({', '.join(WAN)}, or a folder with diffusers' config.json of a generator)"
        )
    if generator in WAN:
        return TextToVideoSize(DECODERS[decoder], WAN[generator])
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
        return TextToVideoSize(DECODERS[decoder], read_config(config))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{file}: {e}") from None
