"""The five models of DIP (arXiv 2504.14145), their data and devices, as far as they are known.

Published: LLMs, sizes of encoders and generators, 16 to 64 devices by tensor and pipeline degrees
(VLMs), sequences of 8,192 tokens with up to 48 pictures of 728 px, 169 tokens each. `ASSUMED` says
what is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import find_hardware
from dflop_jax.records import Hardware, Load
from experiments.paper.cases import H100, Case
from experiments.paper.costs import DTYPE
from models.composed import Composition
from models.sizes import DECODERS, ModelSize, VisionSize
from models.wan import TextToVideo
from models.wan_layers import TIME_TOKENS
from models.wan_sizes import WAN, TextToVideoSize, WanSize

H200 = find_hardware("h200")
SEQUENCE = 8192
MOST_PICTURES = 48
MOST_CLIPS = 16
CLIP_TEXT = SEQUENCE // MOST_CLIPS  # tokens whose states condition a clip
# Two seconds: 8 latent frames of 256 px by patches of 16 px.
CLIP_TOKENS = TIME_TOKENS + CLIP_TEXT + 8 * 256


def _vit(width: int, n_layers: int, n_heads: int) -> VisionSize:
    return VisionSize(728, 14, width, n_layers, n_heads, 4 * width, merge=4, post_norm=False)


VITS: Mapping[str, VisionSize] = {"ViT-5B": _vit(3072, 44, 24), "ViT-22B": _vit(6144, 48, 48)}
DITS: Mapping[str, WanSize] = {"DiT-5B": WAN["wan2.2-5b"], "DiT-30B": WanSize(48, 128, 50, 24576)}
ASSUMED = (
    "ViT-22B is that of arXiv 2302.05442 (48 layers of 6,144), ViT-5B has 44 layers of 3,072; both "
    "look at 728 px by patches of 14 and give 169 tokens a picture (4 x 4 patches become one)",
    "DiT-5B is Wan2.2-5B, DiT-30B is of the same form with 50 layers of 6,144 (MLP 24,576); Qwen2 "
    "has the layers of Qwen2.5",
    f"a VLM's sequence has {SEQUENCE} tokens and 0 to {MOST_PICTURES} pictures, each number as "
    "likely as another; attention joins the whole sequence",
    f"a T2V sequence has {SEQUENCE} tokens and 1 to {MOST_CLIPS} clips of {CLIP_TOKENS} tokens "
    f"(2 s of 256 px and {CLIP_TEXT} of text), each number as likely as another, a clip in a row",
    "a step is 64 sequences; devices are H100 in nodes of 8, 400 Gb/s each, H200 for VLM-L and "
    "T2V-L, which the baseline does not hold in 80 GB (hidden states are not shared among tensor "
    "ranks); VLMs on as many as one copy takes under the paper's degrees (16, 32, 64), T2V-S on "
    "16, T2V-L on 64",
)


@dataclass(frozen=True)
class Vlm:
    """A vision tower and an LLM."""

    tower: str
    decoder: str

    def __call__(self) -> MultimodalModel:
        size = ModelSize(DECODERS[self.decoder], VITS[self.tower])
        return Composition(size, jnp.dtype(DTYPE), attention_kernel="pallas")


@dataclass(frozen=True)
class T2v:
    """An LLM and the generator that it conditions."""

    decoder: str
    generator: str

    def __call__(self) -> MultimodalModel:
        size = TextToVideoSize(DECODERS[self.decoder], DITS[self.generator])
        return _ClipRows(size, jnp.dtype(DTYPE), attention_kernel="pallas")


@dataclass(frozen=True)
class _ClipRows(TextToVideo):
    """Text to video whose clips are of one length, one in a row of the generator."""

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        return {"generator": CLIP_TOKENS}


@dataclass(frozen=True)
class Pictures:
    """Packed sequences with up to `MOST_PICTURES`, each of them a piece of so many patches."""

    patches: int

    def __call__(self, n: int, seed: int) -> list[Load]:
        counts = np.random.default_rng([seed, 0]).integers(0, MOST_PICTURES, n, endpoint=True)
        return [Load({"vision": (self.patches,) * k, "llm": (SEQUENCE,)}) for k in counts.tolist()]


@dataclass(frozen=True)
class Clips:
    """Packed sequences, and the clips that are made of them."""

    def __call__(self, n: int, seed: int) -> list[Load]:
        counts = np.random.default_rng([seed, 1]).integers(1, MOST_CLIPS, n, endpoint=True)
        return [
            Load({"llm": (SEQUENCE,), "generator": (CLIP_TOKENS,) * k}) for k in counts.tolist()
        ]


def _vlm(name: str, tower: str, decoder: str, n_devices: int, hardware: Hardware = H100) -> Case:
    pictures = Pictures(VITS[tower].patches_per_tile)
    return Case(name, Vlm(tower, decoder), pictures, n_devices, GLOBAL_BATCH, hardware)


def _t2v(name: str, decoder: str, dit: str, n_devices: int, hardware: Hardware = H100) -> Case:
    return Case(name, T2v(decoder, dit), Clips(), n_devices, GLOBAL_BATCH, hardware)


GLOBAL_BATCH = 64
CASES = (
    _vlm("VLM-S", "ViT-5B", "llama3-8b", 16),
    _vlm("VLM-M", "ViT-5B", "qwen2.5-32b", 32),
    _vlm("VLM-L", "ViT-22B", "qwen2.5-72b", 64, H200),
    _t2v("T2V-S", "llama3-8b", "DiT-5B", 16),
    _t2v("T2V-L", "qwen2.5-32b", "DiT-30B", 64, H200),
)
