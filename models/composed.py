"""What all compositions of encoders and a decoder have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

import jax.numpy as jnp

from models import hf
from models.attention_choice import known_kernel
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.hf_sizes import folder_size
from models.hf_tensors import HfWeightMap
from models.lora import Lora, adapted
from models.loss import PLAIN, Objective
from models.media import audio_facts, vision_facts
from models.sizes import ModelSize, SizeFamily
from models.vit import VisionModule

# Modules that are published without the others, and where their checkpoints have the parameters.
PUBLISHED_ALONE: Mapping[str, Callable[[Any], HfWeightMap]] = {
    "vision": hf.tower,
    "llm": hf.decoder,
}


@dataclass(frozen=True)
class Composed:
    """Encoders and a decoder as a model of the engine's contract."""

    size: ModelSize
    dtype: jnp.dtype
    lora: Lora | None = None
    attention_kernel: str = "auto"
    objective: Objective = PLAIN

    @property
    def modules(self) -> Mapping[str, Any]:
        """In topological order, with adapters where there are any."""
        return adapted(self._plain, self.lora)

    @property
    def _plain(self) -> dict[str, VisionModule | AudioModule | DecoderModule]:
        """The LLM has a line end where pictures are laid out in lines."""
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
        """Every encoder's features stand at their places among the LLM's tokens."""
        sources = {n: facts.get("sources", 1) for n, facts in self.preprocessing.items()}
        return tuple(
            {"source": n, "target": "llm", "name": "visual", "sources": sources.get(n, 1)}
            for n in self._plain
            if n != "llm"
        )

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """Tokens of a tile or a window, of which every row of an encoder holds one."""
        return {
            name: module.item_tokens
            for name, module in self._plain.items()
            if not isinstance(module, DecoderModule)
        }

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        s = self.size
        facts = {"vision": vision_facts(s.vision, s.layout)} if s.vision else {}
        return facts | ({"audio": audio_facts(s.audio, s.max_windows)} if s.audio else {})

    @property
    def vocab_size(self) -> int:
        return self.size.decoder.vocab

    def with_lora(self, rank: int, alpha: float, **settings: Any) -> Self:
        """The model with low-rank adapters; `settings` are further ones of `models.lora.Lora`."""
        return replace(self, lora=Lora(rank, alpha, **settings))

    def with_objective(self, z_loss: float, label_smoothing: float) -> Self:
        """The model whose LLM is trained on more than the plain loss; see `models.loss`."""
        return replace(self, objective=Objective(z_loss, label_smoothing))

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Where checkpoints of transformers have the parts that are published alone."""
        modules = self._plain
        return {n: partial(to, modules[n]) for n, to in PUBLISHED_ALONE.items() if n in modules}


@dataclass(frozen=True)
class Published(Composed):
    """A composition that transformers has too."""

    @property
    def weights(self) -> HfWeightMap:
        """Where a checkpoint of transformers has the model's parameters."""
        if self.size.audio:
            return hf.qwen2_audio(self)
        assert self.size.vision is not None
        return (
            hf.internvl(self)
            if self.size.vision.form == "internvit"
            else (hf.llava_onevision(self))
        )


Model = TypeVar("Model")


def made(
    cls: Callable[..., Model], family: SizeFamily, size: str, dtype: str, attention_kernel: str
) -> Model:
    """The model of a family of sizes; what the factories in `models/` call.

    Args:
      size: the name of a composition, names of encoders and a decoder joined by "+" (see
        `models.sizes`), or, of published models, a folder with a config.json of transformers.
      dtype: compute dtype, "float32" or "bfloat16", also that in which parameters are held.
      attention_kernel: "auto" (by chip), "cudnn", "pallas" or "xla"; see `models.attention`.

    Raises:
      ValueError: unknown size, dtype or kernel; the message lists the known ones.
    """
    model_size = (folder_size(size, family.kind) if family.kind else None) or family.find(size)
    kernel = known_kernel(attention_kernel)
    return cls(model_size, known_dtype(dtype), attention_kernel=kernel)


def known_dtype(name: str) -> jnp.dtype:
    """A compute dtype by name; ValueError when it is none."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"unknown compute dtype {name!r}; known: float32, bfloat16")
    return jnp.dtype(name)
