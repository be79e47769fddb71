"""The common base of all compositions of encoders and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from models import hf
from models.attention_choice import check_kernel
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.decoder_model import DecoderModel
from models.hf_config import Config
from models.hf_sizes import folder_size
from models.hf_tensors import HfWeightMap
from models.processors import AUDIO_DEFAULTS, read_audio_facts, read_media_processing
from models.sizes import AudioSize, ModelSize, SizeFamily, TileLayout, VisionSize
from models.vit import VisionModule

# Modules that are also published alone, and the weight maps of their checkpoints.
PUBLISHED_ALONE: Mapping[str, Callable[[Any], HfWeightMap]] = {
    "vision": hf.tower_weights,
    "llm": hf.decoder_weights,
}


@dataclass(frozen=True)
class Composition(DecoderModel):
    """Encoders and a decoder as a model of the engine's contract."""

    size: ModelSize

    @property
    def plain(self) -> dict[str, VisionModule | AudioModule | DecoderModule]:
        """The modules; the LLM has a line-end embedding if pictures are laid out in lines."""
        s, kernel = self.size, self.attention_kernel
        modules: dict[str, VisionModule | AudioModule | DecoderModule] = {}
        if s.vision:
            modules["vision"] = VisionModule(s.vision, s.decoder.width, self.dtype, kernel)
        if s.audio:
            modules["audio"] = AudioModule(s.audio, s.decoder.width, self.dtype, kernel)
        modules["llm"] = DecoderModule(
            s.decoder,
            self.dtype,
            newline=s.layout == "anyres",
            attention_kernel=kernel,
            objective=self.objective,
            media=bool(modules),
        )
        return modules

    @property
    def edges(self) -> tuple[Mapping[str, Any], ...]:
        """Edges that put every encoder's features at their places among the LLM's tokens."""
        sources = {n: facts.get("sources", 1) for n, facts in self.preprocessing.items()}
        return tuple(
            {"source": n, "target": "llm", "name": "visual", "sources": sources.get(n, 1)}
            for n in self.plain
            if n != "llm"
        )

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """Tokens of a tile or a window; every row of an encoder holds one."""
        return {
            name: module.item_tokens
            for name, module in self.plain.items()
            if not isinstance(module, DecoderModule)
        }

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        s = self.size
        facts = {"vision": vision_preprocessing(s.vision, s.layout)} if s.vision else {}
        return facts | ({"audio": audio_preprocessing(s.audio, s.max_windows)} if s.audio else {})

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Weight maps of transformers' checkpoints for the parts that are published alone."""
        modules = self.plain
        return {
            n: partial(weight_map, modules[n])
            for n, weight_map in PUBLISHED_ALONE.items()
            if n in modules
        }


@dataclass(frozen=True)
class PublishedComposition(Composition):
    """A composition that transformers also has."""

    @property
    def weights(self) -> HfWeightMap:
        """The weight map of a checkpoint of transformers."""
        if self.size.audio:
            return hf.qwen2_audio_weights(self)
        assert self.size.vision is not None
        return (
            hf.internvl_weights(self)
            if self.size.vision.form == "internvit"
            else (hf.llava_onevision_weights(self))
        )


# ---- media that encoders require, as plain facts for the data preparation ----


def vision_preprocessing(size: VisionSize, layout: TileLayout) -> dict[str, Any]:
    """Return a vision tower's tiles; in "anyres" an LLM token is a weighted sum of 4 features."""
    return {
        "form": layout,
        "tile_px": size.tile_px,
        "tokens_per_tile": size.tokens_per_tile,
        "sources": 4 if layout == "anyres" else 1,
        **dict(size.processing.facts if size.processing else ()),
    }


def audio_preprocessing(size: AudioSize, max_windows: int) -> dict[str, Any]:
    """Return an audio encoder's windows, and how many windows of a long audio it gets."""
    return {
        "n_mels": size.mel_bins,
        "window_s": size.frames * AUDIO_DEFAULTS["hop_length"] / AUDIO_DEFAULTS["sampling_rate"],
        "max_windows": max_windows,
        **dict(size.facts),
    }


Model = TypeVar("Model")


def build_from_size(
    cls: Callable[..., Model],
    family: SizeFamily,
    size: str,
    dtype: str,
    attention_kernel: str,
    read: Callable[[Config], Any] | None = None,
) -> Model:
    """Build the model of a family of sizes, for the factories in `models/`.

    Args:
      size: the name of a composition, names of encoders and a decoder joined by "+" (see
        `models.sizes`), or, for published models, a folder with a config.json of transformers.
      dtype: compute dtype and parameter dtype, "float32" or "bfloat16".
      attention_kernel: "auto" (by chip), "cudnn", "pallas" or "xla"; see `models.attention`.
      read: see `models.hf_sizes.folder_size`.

    Raises:
      ValueError: unknown size, dtype or kernel; the message lists the known ones.
    """
    size_of_folder = folder_size(size, family.kind, read) if family.kind else None
    kernel = check_kernel(attention_kernel)
    if size_of_folder and getattr(size_of_folder, "vision", None):
        processing = read_media_processing(Path(size), family.kind, size_of_folder.vision)
        vision = replace(
            size_of_folder.vision, **({"processing": processing} if processing else {})
        )
        size_of_folder = replace(size_of_folder, vision=vision)
    if size_of_folder and getattr(size_of_folder, "audio", None):
        facts = read_audio_facts(
            Path(size), size_of_folder.audio.mel_bins, size_of_folder.audio.frames
        )
        size_of_folder = replace(
            size_of_folder, audio=replace(size_of_folder.audio, facts=tuple(facts.items()))
        )
    return cls(
        size_of_folder or family.find_size(size), parse_dtype(dtype), attention_kernel=kernel
    )


def parse_dtype(name: str) -> jnp.dtype:
    """Return a compute dtype by name; ValueError if it is unknown."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"unknown compute dtype {name!r}; known: float32, bfloat16")
    return jnp.dtype(name)
