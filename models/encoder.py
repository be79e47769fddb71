"""The common base of encoders: a stem, equal pre-norm layers and a connector, as three Linen parts
that are called with the fields that they read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.attention import AttentionFunction, attention
from models.attention_choice import is_gpu
from models.layers import NORM_EPS, LayerNorm, LayerScale, Linear, RMSNorm, apply
from models.linen_module import Batch, LinenModule
from models.rotary import rotate

Array = jax.Array


# Layers compute items of a multiple of these tokens on GPUs: else XLA pads the operands of most
# products to a multiple of 8 rows, and slices their results, which copies them.
_TOKEN_MULTIPLE = 8
# Name of sums to save in place of the products in them: cuBLAS adds the bias to a product that
# nothing else reads.
_SUM_NAME = "sum"


def pad_tokens(x: Array, n: int, value: int = 0) -> Array:
    """Return x [items, tokens, ...] with n tokens of a value after each item's."""
    padding = ((0, 0), (0, n), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding, constant_values=value) if n else x


class EncoderForm(NamedTuple):
    """The properties in which encoder layers differ.

    `biases`: whether query, key and value have a bias. `qk_norm`: whether queries and keys are
    normed over all heads together. `scaled`: whether a learnt scale per feature follows each
    branch. `fused`: whether query, key and value are one matrix.
    """

    gelu: Callable[[Array], Array]
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    biases: tuple[bool, bool, bool] = (True, True, True)
    qk_norm: bool = False
    scaled: bool = False
    fused: bool = False


class EncoderBlock(nn.Module):
    """Pre-norm encoder layer: full attention among tokens of a segment, two-layer MLP. Queries and
    keys are rotated by `angles`, if given: see `models.rotary`."""

    size: Any  # width, n_layers, n_heads, head_dim, mlp, norm_eps
    form: EncoderForm
    dtype: jnp.dtype
    attend: AttentionFunction = attention
    n_padding: int = 0  # tokens at the end of every item that no token sees

    @nn.compact
    def __call__(
        self, x: Array, segment_ids: Array | None = None, angles: Array | None = None
    ) -> Array:
        s, form, dtype = self.size, self.form, self.dtype
        width, heads, mlp = (s.width,), (s.n_heads, s.head_dim), (s.mlp,)
        embed, head_names = ("embed",), ("heads", None)
        # Without learnt scales, this keeps the sum of all branches of order one.
        residual = (2 * s.n_layers) ** -0.5
        out_std = None if form.scaled else residual * s.width**-0.5
        down_std = None if form.scaled else residual * s.mlp**-0.5

        h = form.norm(s.norm_eps, name="attn_norm")(x)
        if form.fused:
            fused = Linear(width, (3, *heads), embed, (None, *head_names), dtype, True, name="qkv")
            q, k, v = jnp.moveaxis(fused(h), 2, 0)
        else:
            q, k, v = checkpoint_name(
                tuple(
                    Linear(width, heads, embed, head_names, dtype, bias, name=name)(h)
                    for name, bias in zip(("query", "key", "value"), form.biases, strict=True)
                ),
                _SUM_NAME,
            )
        if form.qk_norm:
            q = RMSNorm(NORM_EPS, head_names, name="query_norm")(q)
            k = RMSNorm(NORM_EPS, head_names, name="key_norm")(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        n_keys = 0
        if segment_ids is not None:
            segment_ids = pad_tokens(segment_ids, self.n_padding, -1)
        elif self.n_padding:
            n_keys = q.shape[1] - self.n_padding
        h = self.attend(q, k, v, segment_ids, causal=False, n_keys=n_keys)
        h = Linear(heads, width, head_names, embed, dtype, True, out_std, name="out")(h)
        x = x + (LayerScale(name="attn_scale")(h) if form.scaled else h)

        h = form.norm(s.norm_eps, name="mlp_norm")(x)
        h = Linear(width, mlp, embed, ("mlp",), dtype, True, name="up")(h)
        h = form.gelu(checkpoint_name(h, _SUM_NAME))
        h = Linear(mlp, width, ("mlp",), embed, dtype, True, down_std, name="down")(h)
        return x + (LayerScale(name="mlp_scale")(h) if form.scaled else h)


@dataclass(frozen=True)
class Encoder(LinenModule):
    """An encoder and its connector as a module of the contract; features are [items, tokens of an
    item for the LLM, out_width]."""

    size: Any
    out_width: int
    dtype: jnp.dtype
    attention_kernel: str = "auto"
    chip: str = ""

    @property
    @abstractmethod
    def item_tokens(self) -> int:
        """Tokens that the encoder computes for one item."""

    @property
    @abstractmethod
    def form(self) -> EncoderForm: ...

    @abstractmethod
    def _end(self, part: str) -> nn.Module:
        """Return the Linen module of "entry" or "exit"."""

    @property
    def row_tokens(self) -> int:
        return self.item_tokens

    @property
    def attention_flops(self) -> Mapping[str, float]:
        """Two products for each pair of an item's tokens."""
        return {"pair": 4.0 * self.size.n_heads * self.size.head_dim}

    def segment_ids(self, batch: Batch) -> Array | None:
        """Return int [items, tokens]: an item's tokens of equal id see each other; None: all do."""
        return None

    def angles(self, batch: Batch) -> Array | None:
        """Return the angles that rotate a layer's queries and keys; None: no rotation."""
        return None

    def _block(self) -> nn.Module:
        """Return the Linen module of a layer."""
        return EncoderBlock(self.size, self.form, self.dtype, self.attend, self.n_padding)

    def _linen_part(self, part: str) -> tuple[nn.Module, tuple[Any, ...]]:
        if part == "entry":
            fields = (self.field_spec(name, 1, self.item_tokens) for name in self.inputs[part])
            return self._end(part), tuple(fields)
        hidden = jax.ShapeDtypeStruct((1, self.item_tokens, self.size.width), self.dtype)
        return self._block() if part == "layers" else self._end(part), (hidden,)

    @property
    def n_padding(self) -> int:
        """Padding tokens that layers compute after an item's tokens."""
        return -self.item_tokens % _TOKEN_MULTIPLE if is_gpu(self.chip) else 0

    def entry(self, params: Any, batch: Batch) -> Array:
        return pad_tokens(super().entry(params, batch), self.n_padding)

    def layer(self, params: Any, x: Array, batch: Batch) -> Array:
        return apply(self._block(), params, x, self.segment_ids(batch), self.angles(batch))

    def exit(self, params: Any, x: Array, batch: Batch, entry: Any = None) -> Array:
        return apply(self._end("exit"), params, x[:, : x.shape[1] - self.n_padding])
