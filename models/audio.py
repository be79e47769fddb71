"""Audio encoder of Whisper form (arXiv 2212.04356) as Qwen2-Audio has it (arXiv 2407.10759).

Conv stem, sinusoidal positions, pre-norm layers; then an average over two positions, the final
norm and a linear connector. An item is a chunk of mel frames, the last of which may be padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models.attention import Attend, attend_by, attention, attention_flops
from models.encoder import Encoder
from models.layers import LayerNorm, Linear, exact_gelu, named
from models.sizes import AudioSize

Array = jax.Array
Batch = Mapping[str, Array]
KERNEL = 3  # frames that a step of the conv stem sees


def audio_positions(mel_frames: Any) -> Any:
    """Positions after the conv stem that see a real frame, for one count or an array of them."""
    return (mel_frames - 1) // 2 + 1


def audio_tokens(mel_frames: Any) -> Any:
    """Tokens of a chunk that the LLM sees: pairs of real positions."""
    return audio_positions(mel_frames) // 2


def sinusoids(n: int, width: int) -> np.ndarray:
    """Positions [n, width]: sines of n positions times width / 2 frequencies, then cosines."""
    frequencies = np.exp(-np.log(10000.0) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(n)[:, None] * frequencies[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def windows(x: Array, stride: int) -> Array:
    """[items, frames, features] -> [items, frames / stride, KERNEL, features], zeros outside."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    frames = x.shape[1]
    return jnp.stack([padded[:, i : i + frames : stride] for i in range(KERNEL)], axis=2)


class EntryModule(nn.Module):
    """Mel features [items, mel_bins, frames] -> hidden states [items, frames / 2, width]."""

    size: AudioSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, mel: Array) -> Array:
        s = self.size
        x = mel.astype(self.dtype).transpose(0, 2, 1)
        for name, stride in (("conv1", 1), ("conv2", 2)):
            seen = (KERNEL, x.shape[-1])
            conv = Linear(
                seen, (s.width,), (None, None), ("embed",), self.dtype, bias=True, name=name
            )
            x = exact_gelu(conv(windows(x, stride)))
        # A parameter, since the released weights hold it rounded; never trained or decayed.
        init = named(lambda *_: jnp.asarray(sinusoids(s.positions, s.width)), None, "embed")
        position = self.param("bias", init, (s.positions, s.width), jnp.float32)
        return x + jax.lax.stop_gradient(position).astype(self.dtype)[None]


class Block(nn.Module):
    """Pre-norm encoder layer; the key has no bias. Real positions do not see padding."""

    size: AudioSize
    dtype: jnp.dtype
    attend: Attend = attention

    @nn.compact
    def __call__(self, x: Array, mel_frames: Array) -> Array:
        s, dtype = self.size, self.dtype
        width, heads, mlp = (s.width,), (s.n_heads, s.head_dim), (s.mlp,)
        embed, head_names = ("embed",), ("heads", None)
        residual = (2 * s.n_layers) ** -0.5  # keeps the sum of all branches of order one

        h = LayerNorm(s.norm_eps, name="attn_norm")(x)
        q, k, v = (
            Linear(width, heads, embed, head_names, dtype, bias, name=name)(h)
            for name, bias in (("query", True), ("key", False), ("value", True))
        )
        ids = jnp.arange(s.positions, dtype=jnp.int32)[None] < audio_positions(mel_frames)[:, None]
        h = self.attend(q, k, v, ids.astype(jnp.int32), causal=False)
        std = residual * s.width**-0.5
        x = x + Linear(heads, width, head_names, embed, dtype, bias=True, std=std, name="out")(h)

        h = LayerNorm(s.norm_eps, name="mlp_norm")(x)
        h = Linear(width, mlp, embed, ("mlp",), dtype, bias=True, name="up")(h)
        h = exact_gelu(h)
        std = residual * s.mlp**-0.5
        return x + Linear(mlp, width, ("mlp",), embed, dtype, bias=True, std=std, name="down")(h)


class ExitModule(nn.Module):
    """Average over two positions, final norm, linear connector."""

    size: AudioSize
    out_width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s = self.size
        items = x.shape[0]
        x = x.reshape(items, s.tokens_per_chunk, 2, s.width).mean(axis=2)
        x = LayerNorm(s.norm_eps, name="norm")(x)
        width, out = (s.width,), (self.out_width,)
        return Linear(width, out, (None,), ("embed",), self.dtype, bias=True, name="out")(x)


@dataclass(frozen=True)
class AudioModule(Encoder):
    """The encoder and its connector as the engine sees them.

    Features come out as [chunks, tokens_per_chunk, out_width]; of a chunk the first
    `audio_tokens(mel_frames)` are to be used.
    """

    size: AudioSize
    out_width: int
    dtype: jnp.dtype
    attention_kernel: str = "auto"

    @property
    def item_tokens(self) -> int:
        return self.size.positions

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {"entry": ("mel",), "layers": ("mel_frames",), "exit": ()}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {"entry": "audio", "layers": "audio", "exit": "connector"}

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """`mel` float32 [items, mel_bins, frames]; `mel_frames` int32 [items], how many of the
        frames are real (0 for a chunk that pads); `tokens` is fixed by the chunk."""
        if name == "mel":
            shape = (items, self.size.mel_bins, self.size.frames)
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        if name == "mel_frames":
            return jax.ShapeDtypeStruct((items,), jnp.int32)
        raise ValueError(f"the audio module has no field {name!r}; it reads 'mel', 'mel_frames'")

    def _linen(self, part: str) -> nn.Module:
        if part == "entry":
            return EntryModule(self.size, self.dtype)
        if part == "layers":
            return Block(self.size, self.dtype, attend_by(self.attention_kernel))
        return ExitModule(self.size, self.out_width, self.dtype)

    def flops(self, part: str, items: int, tokens: int) -> float:
        """Matrix-product FLOPs of `items` chunks; `tokens` is fixed by the chunk."""
        s = self.size
        n = float(items * s.positions)
        if part == "entry":
            return 2 * n * KERNEL * s.width * (2 * s.mel_bins + s.width)
        if part == "layers":
            products = 4 * s.width**2 + 2 * s.width * s.mlp
            return 2 * n * products + attention_flops(items, s.positions, s.n_heads, s.head_dim)
        return 2.0 * items * s.tokens_per_chunk * s.width * self.out_width
