"""Text to video: an LLM reads a caption, and its hidden states condition a diffusion transformer in
the form of Wan (arXiv 2503.20314), which learns the flow from noise to latents of clips.

The modules' inputs:

"llm": a piece is a caption. Each token has: tokens int32.

"generator": a piece is a clip: TIME_TOKENS tokens of its time, then its text, then patches of its
  latents by time, row and column. In attention only patches are queries; patches and text are keys.
  Each token has:
- positions int32 [3]: time, row and column of a patch, counted in patches.
- target float32 [values]: noise - clip, which the generator is to say; zeros where there is none.
- weights float32: of the patch's loss, the mean of its squared errors; 0 where there is no patch.
The LLM's states replace the tokens TEXT, one to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention_choice import check_kernel
from models.composed import parse_dtype
from models.decoder_model import AdaptableModel
from models.hf_tensors import HfWeightMap
from models.layers import apply
from models.linen_module import Batch, LinenModule
from models.text_states import TextStates
from models.wan_layers import CLIP, TEXT, TIME_TOKENS, WanBlock, WanEntry, WanHead
from models.wan_sizes import TextToVideoSize, WanSize, find_size
from models.wan_weights import weight_map

Array = jax.Array
# Name of a field -> the dims of a token's value ("values" of a patch, "text" states) and its dtype.
FIELD_SPECS: Mapping[str, tuple[tuple[int | str, ...], Any]] = {
    "role": ((), jnp.int32),
    "time": ((), jnp.float32),
    "latents": (("values",), jnp.float32),
    "text": (("text",), None),
    "positions": ((3,), jnp.int32),
    "segment_ids": ((), jnp.int32),
    "target": (("values",), jnp.float32),
    "weights": ((), jnp.float32),
}


@dataclass(frozen=True)
class WanModule(LinenModule):
    """The generator as a module of the contract, trained by flow matching (arXiv 2210.02747)."""

    size: WanSize
    dtype: jnp.dtype
    attention_kernel: str = "auto"
    chip: str = ""
    loss_weight: float = 1.0

    @property
    def attention_flops(self) -> Mapping[str, float]:
        """Two products for each pair of a patch and a patch or a text token."""
        return {"pair": 4.0 * self.size.width}

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {
            "entry": ("latents", "time", "role", "text"),
            "layers": ("role", "positions", "segment_ids"),
            "exit": ("segment_ids", "target", "weights"),
        }

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return dict.fromkeys(self.inputs, "generator")

    def field_spec(self, name: str, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Return shape [rows, tokens, ...] and dtype of a field."""
        if name not in FIELD_SPECS:
            raise ValueError(
                f"the generator has no field {name!r}; it reads {', '.join(FIELD_SPECS)}"
            )
        dims, dtype = FIELD_SPECS[name]
        sizes = {"values": self.size.patch_values, "text": self.size.text_width}
        shape = (sizes[d] if isinstance(d, str) else d for d in dims)
        return jax.ShapeDtypeStruct((rows, tokens, *shape), dtype or self.dtype)

    def _linen_part(self, part: str) -> tuple[nn.Module, tuple[Any, ...]]:
        hidden = jax.ShapeDtypeStruct((1, 1, self.size.width), self.dtype)
        fields = [self.field_spec(name, 1, 1) for name in self.inputs[part]]
        if part == "entry":
            return WanEntry(self.size, self.dtype), tuple(fields)
        if part == "layers":
            return WanBlock(self.size, self.dtype, self.attend), (hidden, *fields)
        return WanHead(self.size, self.dtype), (hidden, fields[0])

    def layer(self, params: Any, x: Array, batch: Batch) -> Array:
        fields = (batch[name] for name in self.inputs["layers"])
        return apply(self._linen_part("layers")[0], params, x, *fields)

    def velocity(self, params: Any, x: Array, batch: Batch) -> Array:
        """Return noise - clip, float32 [rows, tokens, values], as the exit predicts it."""
        return apply(self._linen_part("exit")[0], params, x, batch["segment_ids"])

    def exit(self, params: Any, x: Array, batch: Batch, entry: Any = None) -> dict[str, Array]:
        """Return the microbatch's sum of the patches' weighted losses."""
        error = self.velocity(params, x, batch) - batch["target"]
        return {"loss_sum": jnp.sum(jnp.mean(error**2, axis=-1) * batch["weights"])}

    @property
    def weights(self) -> HfWeightMap:
        """The weight map of a checkpoint of diffusers."""
        return weight_map(self)


@dataclass(frozen=True)
class TextToVideo(AdaptableModel):
    """LLM and generator as a model of the engine's contract."""

    size: TextToVideoSize

    @property
    def llm(self) -> TextStates:
        width, kernel = self.size.generator.text_width, self.attention_kernel
        return TextStates(self.size.decoder, self.dtype, attention_kernel=kernel, out_width=width)

    @property
    def generator(self) -> WanModule:
        return WanModule(self.size.generator, self.dtype, self.attention_kernel)

    @property
    def plain(self) -> Mapping[str, Any]:
        return {"llm": self.llm, "generator": self.generator}

    @property
    def edges(self) -> tuple[Mapping[str, Any], ...]:
        return ({"source": "llm", "target": "generator", "name": "text"},)

    data_factory = "dflop_jax.data.datasets.clips:make_clip_source"

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        """Format of clips: see `dflop_jax.data.datasets.clips.ClipFormat`."""
        s = self.size.generator
        facts = {"channels": s.channels, "patch": s.patch, "shift": s.shift}
        return {"generator": {**facts, "time_tokens": TIME_TOKENS, "text": TEXT, "clip": CLIP}}

    @property
    def part_weights(self) -> Mapping[str, Callable[[], HfWeightMap]]:
        """Weight maps of the parts: the LLM's from transformers, the generator's from diffusers."""
        return {"llm": lambda: self.llm.weights, "generator": lambda: self.generator.weights}


def build(
    size: str = "tiny-short+wan-tiny", dtype: str = "float32", attention_kernel: str = "auto"
) -> TextToVideo:
    """Build by size, DECODER+GENERATOR; see `models.wan_sizes.find_size`."""
    kernel = check_kernel(attention_kernel)
    return TextToVideo(find_size(size), parse_dtype(dtype), attention_kernel=kernel)
