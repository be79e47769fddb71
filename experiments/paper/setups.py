"""The set-ups of DFLOP's paper: models, data and the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import find_hardware
from dflop_jax.records import Hardware, Load
from experiments.paper import data
from experiments.paper.cases import Case, Untuned
from experiments.paper.costs import DTYPE
from models import qwen2_audio
from models.composed import PublishedComposition
from models.sizes import DECODERS, VISION, ModelSize

# 8 nodes of 8 A100 with NVLink, 800 Gb/s a node: an eighth of it per device.
CLUSTER = replace(find_hardware("a100-80"), network_bandwidth=12.5e9)
N_DEVICES, GLOBAL_BATCH = 64, 256  # unless a result states others
# The public training script has four stages and recomputes every layer; more where memory needs it.
UNTUNED = Untuned(stages=(4, 8, 16), remats=("layers",))


@dataclass(frozen=True)
class PublishedModel:
    """A model at full size with GPU attention kernels; `tower` and `decoder` as the paper names
    them."""

    tower: str
    decoder: str
    layout: str = "anyres"

    def __call__(self) -> MultimodalModel:
        if self.tower.startswith("whisper"):
            return qwen2_audio.build("qwen2-audio-7b", DTYPE, "pallas")
        if self.layout == "dynamic":
            tower = VISION[self.tower]
        else:
            tower = replace(VISION[self.tower], merge=1, post_norm=False)
        size = ModelSize(DECODERS[self.decoder], tower, layout=self.layout)
        return PublishedComposition(size, DTYPE, attention_kernel="pallas")


@dataclass(frozen=True)
class MixtureSamples:
    """Samples of a mixture under a model's picture layout."""

    mixture: str
    layout: str

    def __call__(self, n: int, seed: int) -> list[Load]:
        return data.draw_loads(self.mixture, self.layout, n, 7919 * seed)


def _case(name: str, model: PublishedModel, mixture: str = "vision") -> Case:
    drawn = MixtureSamples(mixture, model.layout)
    return Case(name, model, drawn, N_DEVICES, GLOBAL_BATCH, CLUSTER, 4, UNTUNED)


def _llava(tower: str, decoder: str) -> Case:
    shown = {"siglip-so400m": "SigLIP-400M", "siglip-1b": "SigLIP-1B", "siglip-6b": "SigLIP-6B"}
    names = {"qwen2.5": "Qwen2.5", "llama3": "Llama3"}
    family, size = decoder.split("-")
    name = f"{shown[tower]} + {names[family]}-{size.upper()}"
    return _case(name, PublishedModel(tower, decoder))


# The public code's configuration names SigLIP 6B; the released LLaVA-OneVision has the 400M.
TOWERS = ("siglip-so400m", "siglip-1b", "siglip-6b")
LLMS = ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b", "llama3-8b", "llama3-70b")
LLAVA = {(t, d): _llava(t, d) for t in TOWERS for d in LLMS}
INTERNVL_72B = _case(
    "InternViT-6B + Qwen2.5-72B", PublishedModel("internvit-6b", "qwen2.5-72b", "dynamic")
)
QWEN2_AUDIO = _case("Qwen2-Audio-7B", PublishedModel("whisper-large-v3", "qwen-7b"), "audio")
SETUPS = (*(LLAVA["siglip-6b", d] for d in LLMS), INTERNVL_72B, QWEN2_AUDIO)
# Hours of an epoch that the paper states, for the baseline and DFLOP.
PAPER_EPOCH_HOURS = {
    LLAVA["siglip-6b", "qwen2.5-32b"].name: (38.0, 14.0),
    LLAVA["siglip-6b", "llama3-8b"].name: (24.0, 10.0),
    INTERNVL_72B.name: (60.0, 22.0),
}


def describe_cluster(hardware: Hardware = CLUSTER) -> Mapping[str, str]:
    """Return the cluster's specification for reports."""
    return {
        "device": hardware.name,
        "peak": f"{hardware.bfloat16_flops / 1e12:.0f} TFLOP/s bfloat16",
        "memory": f"{hardware.memory_bytes / 1e9:.0f} GB at {hardware.memory_bandwidth / 1e9:.0f}"
        " GB/s",
        "node": f"{hardware.devices_per_node} devices, NVLink {hardware.link_bandwidth / 1e9:.0f}"
        " GB/s a direction",
        "network": f"{hardware.network_bandwidth * 8 / 1e9:.0f} Gb/s a device",
    }
