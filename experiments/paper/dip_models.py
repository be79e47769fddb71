"""The five models of DIP (arXiv 2504.14145), their data and devices.

Published: LLMs, sizes of encoders and generators, 16 to 64 devices by tensor and pipeline degrees
(VLMs), sequences of 8,192 tokens with up to 48 pictures of 728 px, 169 tokens each. `ASSUMED`
lists the assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import find_hardware
from dflop_jax.records import Hardware, Load
from experiments.paper.cases import H100, Case, Untuned
from experiments.paper.costs import DTYPE
from experiments.paper.tuning import REMATS
from models.composed import Composition
from models.sizes import DECODERS, ModelSize, VisionSize
from models.wan import TextToVideo
from models.wan_layers import TIME_TOKENS
from models.wan_sizes import WAN, TextToVideoSize, WanSize

H200 = find_hardware("h200")
SEQUENCE_TOKENS = 8192
MAX_PICTURES = 48
MAX_CLIPS = 16
CLIP_TEXT_TOKENS = SEQUENCE_TOKENS // MAX_CLIPS  # text tokens that condition a clip
# Two seconds: 8 latent frames of 256 px by patches of 16 px.
CLIP_TOKENS = TIME_TOKENS + CLIP_TEXT_TOKENS + 8 * 256


def _vit_size(width: int, n_layers: int, n_heads: int) -> VisionSize:
    return VisionSize(728, 14, width, n_layers, n_heads, 4 * width, merge=4, post_norm=False)


VITS: Mapping[str, VisionSize] = {
    "ViT-5B": _vit_size(3072, 44, 24),
    "ViT-22B": _vit_size(6144, 48, 48),
}
DITS: Mapping[str, WanSize] = {"DiT-5B": WAN["wan2.2-5b"], "DiT-30B": WanSize(48, 128, 50, 24576)}
ASSUMED = (
    "ViT-22B follows arXiv 2302.05442 (48 layers of 6,144), ViT-5B has 44 layers of 3,072; both "
    "use patches of 14 px and give 169 tokens per picture of 728 px (4 x 4 patches become one)",
    "DiT-5B is Wan2.2-5B, DiT-30B has the same architecture with 50 layers of 6,144 (MLP 24,576); "
    "Qwen2 has the layers of Qwen2.5",
    f"a VLM's sequence has {SEQUENCE_TOKENS} tokens and 0 to {MAX_PICTURES} pictures, uniformly "
    "distributed; attention covers the whole sequence",
    f"a T2V sequence has {SEQUENCE_TOKENS} tokens and 1 to {MAX_CLIPS} clips of {CLIP_TOKENS} "
    f"tokens (2 s of 256 px and {CLIP_TEXT_TOKENS} of text), uniform, one clip per row",
    "a step has 64 sequences; devices are H100 in nodes of 8 with 400 Gb/s each, but H200 for "
    "VLM-L and T2V-L: the baseline exceeds 80 GB (tensor ranks do not shard hidden states); VLMs "
    "have one replica under the paper's degrees (16, 32, 64), T2V-S 16 and T2V-L 64 devices",
    "the untuned baseline has the paper's degrees (tensor 4 and pipeline 4 for VLM-S, 8 and 4 for "
    "VLM-M, 8 and 8 for VLM-L; T2V-S as VLM-S and T2V-L as VLM-L, by analogy), equal layer counts "
    "per stage, one sequence per microbatch, and the least recomputation that fits",
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
    """A text-to-video model with clips of one length; each fills a row of the generator."""

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        return {"generator": CLIP_TOKENS}


@dataclass(frozen=True)
class PictureSequences:
    """Packed sequences with `low` to `high` pictures of `patches` patches each."""

    patches: int
    low: int = 0
    high: int = MAX_PICTURES

    def __call__(self, n: int, seed: int) -> list[Load]:
        counts = np.random.default_rng([seed, 0]).integers(self.low, self.high, n, endpoint=True)
        return [
            Load({"vision": (self.patches,) * k, "llm": (SEQUENCE_TOKENS,)})
            for k in counts.tolist()
        ]


@dataclass(frozen=True)
class ClipSequences:
    """Packed sequences, and the `low` to `high` clips generated from each of them."""

    low: int = 1
    high: int = MAX_CLIPS

    def __call__(self, n: int, seed: int) -> list[Load]:
        counts = np.random.default_rng([seed, 1]).integers(self.low, self.high, n, endpoint=True)
        return [
            Load({"llm": (SEQUENCE_TOKENS,), "generator": (CLIP_TOKENS,) * k})
            for k in counts.tolist()
        ]


def _vlm_case(name: str, tower: str, decoder: str, pipeline: int, **options: Any) -> Case:
    pictures = PictureSequences(VITS[tower].patches_per_tile)
    return _case(name, Vlm(tower, decoder), pictures, pipeline, **options)


def _t2v_case(name: str, decoder: str, generator: str, pipeline: int, **options: Any) -> Case:
    return _case(name, T2v(decoder, generator), ClipSequences(), pipeline, **options)


def _case(
    name: str, model: Vlm | T2v, sequences: Any, pipeline: int, *, tensor: int, hardware: Hardware
) -> Case:
    """Return a case on the devices of one replica of the untuned baseline."""
    untuned = Untuned((pipeline,), REMATS)
    n_devices = pipeline * tensor
    return Case(name, model, sequences, n_devices, GLOBAL_BATCH, hardware, untuned=untuned)


GLOBAL_BATCH = 64
CASES = (
    _vlm_case("VLM-S", "ViT-5B", "llama3-8b", 4, tensor=4, hardware=H100),
    _vlm_case("VLM-M", "ViT-5B", "qwen2.5-32b", 4, tensor=8, hardware=H100),
    _vlm_case("VLM-L", "ViT-22B", "qwen2.5-72b", 8, tensor=8, hardware=H200),
    _t2v_case("T2V-S", "llama3-8b", "DiT-5B", 4, tensor=4, hardware=H100),
    _t2v_case("T2V-L", "qwen2.5-32b", "DiT-30B", 8, tensor=8, hardware=H200),
)
VLM_S, T2V_S = CASES[0], CASES[3]
# Set-ups with one input changed that the paper does not state.
POINTS: Mapping[str, Case] = {
    **{case.name: case for case in CASES},
    **{
        f"{case.name}, {n} sequences per step": replace(case, global_batch=n)
        for case in (VLM_S, T2V_S)
        for n in (16, 256)
    },
    **{
        f"VLM-S, {low} to {high} pictures per sequence": replace(
            VLM_S, draw_loads=PictureSequences(VITS["ViT-5B"].patches_per_tile, low, high)
        )
        for low, high in ((0, 16), (32, 48))
    },
    **{
        f"T2V-S, {low} to {high} clips per sequence": replace(
            T2V_S, draw_loads=ClipSequences(low, high)
        )
        for low, high in ((1, 4), (1, 8), (8, 16))
    },
}
