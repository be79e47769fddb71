"""Whisper's audio encoder (arXiv 2212.04356) in the form of Qwen2-Audio (arXiv 2407.10759).

Conv stem, sinusoidal positions, pre-norm layers; then an average over two positions, the final norm
and a linear connector. An item is a chunk of mel frames, which may end in padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models.encoder import Encoder, EncoderForm
from models.layers import LayerNorm, Linear, exact_gelu, named_init
from models.linen_module import Batch
from models.sizes import AudioSize

Array = jax.Array
CONV_FRAMES = 3  # kernel size of the conv stem, in frames


def audio_positions(mel_frames: Any) -> Any:
    """Return the positions after the conv stem that see a real frame, for a count or an array."""
    return (mel_frames - 1) // 2 + 1


def sinusoids(n: int, width: int) -> np.ndarray:
    """Return position embeddings [n, width]: sines of width / 2 frequencies, then cosines."""
    frequencies = np.exp(-np.log(10000.0) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(n)[:, None] * frequencies[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def conv_windows(x: Array, stride: int) -> Array:
    """Cut zero-padded [items, frames, features] into [items, frames / stride, KERNEL, features]."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    frames = x.shape[1]
    return jnp.stack([padded[:, i : i + frames : stride] for i in range(CONV_FRAMES)], axis=2)


class AudioEntry(nn.Module):
    """Mel features [items, mel_bins, frames] -> hidden states [items, frames / 2, width]."""

    size: AudioSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, mel: Array) -> Array:
        s = self.size
        x = mel.astype(self.dtype).transpose(0, 2, 1)
        for name, stride in (("conv1", 1), ("conv2", 2)):
            kernel_shape = (CONV_FRAMES, x.shape[-1])
            conv = Linear(
                kernel_shape, (s.width,), (None, None), ("embed",), self.dtype, bias=True, name=name
            )
            x = exact_gelu(conv(conv_windows(x, stride)))
        # A parameter, since released weights hold it rounded; it is never trained or decayed.
        init = named_init(lambda *_: jnp.asarray(sinusoids(s.positions, s.width)), None, "embed")
        position = self.param("bias", init, (s.positions, s.width), jnp.float32)
        return x + jax.lax.stop_gradient(position).astype(self.dtype)[None]


class AudioExit(nn.Module):
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
        width, out_shape = (s.width,), (self.out_width,)
        return Linear(width, out_shape, (None,), ("embed",), self.dtype, bias=True, name="out")(x)


@dataclass(frozen=True)
class AudioModule(Encoder):
    """See `Encoder`; the LLM uses the first `media.mel.encoder_tokens` of a chunk's features."""

    size: AudioSize

    @property
    def item_tokens(self) -> int:
        return self.size.positions

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {"entry": ("mel",), "layers": ("mel_frames",), "exit": ()}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {"entry": "audio", "layers": "audio", "exit": "connector"}

    @property
    def form(self) -> EncoderForm:
        """Layers whose keys have no bias."""
        return EncoderForm(exact_gelu, biases=(True, False, True))

    def segment_ids(self, batch: Batch) -> Array:
        """Return ids by which real positions do not see padding."""
        real = audio_positions(batch["mel_frames"])[:, None]
        ids = jnp.arange(self.size.positions, dtype=jnp.int32)[None] < real
        return ids.astype(jnp.int32)

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Return a struct: `mel` float32 [items, bins, frames]; `mel_frames` int32 [items]."""
        if name == "mel":
            shape = (items, self.size.mel_bins, self.size.frames)
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        if name == "mel_frames":
            return jax.ShapeDtypeStruct((items,), jnp.int32)
        raise ValueError(f"the audio module has no field {name!r}; it reads 'mel', 'mel_frames'")

    def _end(self, part: str) -> nn.Module:
        if part == "entry":
            return AudioEntry(self.size, self.dtype)
        return AudioExit(self.size, self.out_width, self.dtype)
