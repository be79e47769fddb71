"""The paper's models and clusters, and the predicted profiles that all experiments share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import Hardware, find_hardware
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.records import ModelProfile, Shape
from models import qwen2_audio
from models.composed import Published
from models.sizes import DECODERS, VISION, ModelSize

# 8 nodes of 8 A100 with NVLink, 800 Gb/s a node: an eighth of that for each device.
CLUSTER = replace(find_hardware("a100-80"), network_bandwidth=12.5e9)
DEGREES = (1, 2, 4, 8)
MOST_DEVICES = 4096
ITEMS = (1, 4, 16, 64)
TOKENS = (512, 2048, 8192, 16384)
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Setup:
    """One of the paper's models. `tower` and `decoder` are named as in the paper; `hours` are the
    paper's training times (baseline, DFLOP) where it states them."""

    name: str
    tower: str
    decoder: str
    mixture: str = "vision"
    layout: str = "anyres"
    hours: tuple[float, float] | None = None


def _llava(tower: str, decoder: str, hours: tuple[float, float] | None = None) -> Setup:
    shown = {"siglip-so400m": "SigLIP-400M", "siglip-1b": "SigLIP-1B", "siglip-6b": "SigLIP-6B"}
    names = {"qwen2.5": "Qwen2.5", "llama3": "Llama3"}
    family, size = decoder.split("-")
    return Setup(f"{shown[tower]} + {names[family]}-{size.upper()}", tower, decoder, hours=hours)


# The public code's configuration names SigLIP 6B; the released LLaVA-OneVision has the 400M.
TOWERS = ("siglip-so400m", "siglip-1b", "siglip-6b")
_HOURS = {"qwen2.5-32b": (38.0, 14.0), "llama3-8b": (24.0, 10.0)}
LLMS = ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b", "llama3-8b", "llama3-70b")
LLAVA = {(t, d): _llava(t, d, _HOURS.get(d)) for t in TOWERS for d in LLMS}
INTERNVL_72B = Setup(
    "InternViT-6B + Qwen2.5-72B",
    "internvit-6b",
    "qwen2.5-72b",
    layout="dynamic",
    hours=(60.0, 22.0),
)
QWEN2_AUDIO = Setup("Qwen2-Audio-7B", "whisper-large-v3", "qwen-7b", mixture="audio")


def model_of(setup: Setup) -> MultimodalModel:
    """The model at full size, with the attention that a GPU runs."""
    if setup.mixture == "audio":
        return qwen2_audio.build("qwen2-audio-7b", DTYPE, "pallas")
    if setup.layout == "dynamic":
        # 16 heads as in the public DFLOP code: the published 25 split over no node
        tower = replace(VISION[setup.tower], n_heads=16)
        size = ModelSize(DECODERS[setup.decoder], tower, layout="dynamic")
    else:
        tower = replace(VISION[setup.tower], merge=1, post_norm=False)
        size = ModelSize(DECODERS[setup.decoder], tower, layout="anyres")
    return Published(size, DTYPE, attention_kernel="pallas")


@cache
def profile_of(setup: Setup, hardware: Hardware = CLUSTER) -> ModelProfile:
    """Predicted times and bytes of a model on the cluster."""
    return predicted(model_of(setup), hardware)


COSTS = ("roofline", "compiled")
_costs = COSTS[0]


def take_costs(name: str) -> None:
    """Say where this process has predicted costs from, one of `COSTS`; before the first of them."""
    global _costs
    _costs = name


def costs() -> str:
    """What `take_costs` was told."""
    return _costs


@cache
def predicted(model: MultimodalModel, hardware: Hardware) -> ModelProfile:
    """A profile by the roofline over traced kernels, or over those of compiled programs."""
    if _costs == "compiled":
        from experiments.paper.compiled import compiled_profile  # which knows all models

        return compiled_profile(model, hardware)
    return _by_roofline(model, hardware)


def _by_roofline(model: MultimodalModel, hardware: Hardware) -> ModelProfile:
    shapes = shapes_of(model, ITEMS, TOKENS)
    return roofline_profile(model, hardware, shapes, DEGREES, n_devices=MOST_DEVICES)


def shapes_of(
    model: MultimodalModel, items: Sequence[int], tokens: Sequence[int]
) -> dict[str, list[Shape]]:
    """By module rows of one piece each, or one row of so many tokens."""
    alone = model.piece_tokens
    return {
        m: [Shape(n, alone[m]) for n in items] if m in alone else [Shape(1, t) for t in tokens]
        for m in model.modules
    }


def described(hardware: Hardware = CLUSTER) -> Mapping[str, str]:
    """The cluster's figures, for reports."""
    return {
        "device": hardware.name,
        "peak": f"{hardware.bfloat16_flops / 1e12:.0f} TFLOP/s bfloat16",
        "memory": f"{hardware.memory_bytes / 1e9:.0f} GB at {hardware.memory_bandwidth / 1e9:.0f}"
        " GB/s",
        "node": f"{hardware.devices_per_node} devices, NVLink {hardware.link_bandwidth / 1e9:.0f}"
        " GB/s a direction",
        "network": f"{hardware.network_bandwidth * 8 / 1e9:.0f} Gb/s a device",
    }
