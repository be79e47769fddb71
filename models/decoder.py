"""Decoder-only LLM in the form of Llama-3 (arXiv 2407.21783), Qwen2.5 (arXiv 2412.15115) and Qwen3
(arXiv 2505.09388).

RMSNorm, rotary positions, grouped-query attention within packed samples, SwiGLU; an item is a row
of packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import AttentionFunction, attention
from models.embedding import embed
from models.layers import Linear, RMSNorm, apply, named_init, normal
from models.linen_module import Batch, LinenModule
from models.loss import NLL_ONLY, Objective, cross_entropy, head_logits
from models.memory import KVMemory
from models.rotary import angles_of, rotate
from models.sizes import DecoderSize

Array = jax.Array

FIELD_DTYPES = {
    **dict.fromkeys(("tokens", "segment_ids", "positions", "targets"), jnp.int32),
    "weights": jnp.float32,
    **dict.fromkeys(("is_visual", "is_newline"), jnp.bool_),
}


class DecoderEntry(nn.Module):
    """Token embeddings; encoders' features replace them where `is_visual`, and a learnt line end of
    pictures replaces them where `is_newline`."""

    size: DecoderSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        is_visual: Array | None = None,
        visual: Array | None = None,
        is_newline: Array | None = None,
    ) -> Array:
        s = self.size
        init = named_init(normal(s.width**-0.5), "vocab", "embed")
        table = self.param("embedding", init, (s.vocab, s.width), jnp.float32)
        x = embed(table, tokens).astype(self.dtype)
        if is_newline is not None:
            line_end = self.param(
                "image_newline", named_init(normal(s.width**-0.5), "embed"), (s.width,), jnp.float32
            )
            x = jnp.where(is_newline[:, :, None], line_end.astype(self.dtype)[None, None], x)
        if is_visual is None or visual is None:
            return x
        return jnp.where(is_visual[:, :, None], visual.astype(self.dtype), x)


class DecoderBlock(nn.Module):
    """Pre-norm decoder layer; `attend` has the signature of `attention`."""

    size: DecoderSize
    dtype: jnp.dtype
    attend: AttentionFunction = attention

    @nn.compact
    def __call__(self, x: Array, positions: Array, segment_ids: Array) -> Array:
        s, dtype = self.size, self.dtype
        linear = partial(Linear, dtype=dtype)
        width, mlp, embed = (s.width,), (s.mlp,), ("embed",)
        q_shape, q_names = (s.n_heads, s.head_dim), ("heads", None)
        kv_shape, kv_names = (s.n_kv_heads, s.head_dim), ("kv_heads", None)
        bias = s.qkv_bias
        residual = (2 * s.n_layers) ** -0.5  # keeps the sum of all branches of order one

        h = RMSNorm(s.norm_eps, name="attn_norm")(x)
        q = linear(width, q_shape, embed, q_names, bias=bias, name="query")(h)
        k = linear(width, kv_shape, embed, kv_names, bias=bias, name="key")(h)
        v = linear(width, kv_shape, embed, kv_names, bias=bias, name="value")(h)
        if s.qk_norm:
            q = RMSNorm(s.norm_eps, (None,), name="query_norm")(q)
            k = RMSNorm(s.norm_eps, (None,), name="key_norm")(k)
        angles = angles_of(positions, s.head_dim // 2, s.rope_theta, s.mrope_sections)
        q, k = rotate(q, angles), rotate(k, angles)
        h = self.attend(q, k, v, segment_ids, causal=True)
        std = residual * s.width**-0.5
        x = x + linear(q_shape, width, q_names, embed, std=std, name="out")(h)

        h = RMSNorm(s.norm_eps, name="mlp_norm")(x)
        gate = linear(width, mlp, embed, ("mlp",), name="gate")(h)
        up_branch = linear(width, mlp, embed, ("mlp",), name="up")(h)
        h = jax.nn.silu(gate) * up_branch
        std = residual * s.mlp**-0.5
        return x + linear(mlp, width, ("mlp",), embed, std=std, name="down")(h)


class DecoderExit(nn.Module):
    """Final norm and head; returns (normed hidden states, head table [vocab, width])."""

    size: Any  # has width, vocab, tied, norm_eps, norm_around

    @nn.compact
    def __call__(self, x: Array, tied_table: Array | None) -> tuple[Array, Array]:
        s = self.size
        x = RMSNorm(s.norm_eps, offset=s.norm_offset, name="norm")(x)
        if s.tied:
            assert tied_table is not None, "a tied head needs the entry's parameters"
            return x, tied_table
        init = named_init(normal(s.width**-0.5), "vocab", "embed")
        return x, self.param("head", init, (s.vocab, s.width), jnp.float32)


@dataclass(frozen=True)
class DecoderModule(LinenModule):
    """The LLM as a module of the contract, with text and, if `media`, encoders' features. With
    `newline` it has an embedding of a picture's line end. After each of the first `deepstack`
    layers, features of an edge "deepstack_0" etc. are added at their tokens (arXiv 2406.04334)."""

    size: DecoderSize
    dtype: jnp.dtype
    newline: bool = False
    attention_kernel: str = "auto"
    chip: str = ""
    deepstack: int = 0
    objective: Objective = NLL_ONLY
    media: bool = True

    @property
    def tied(self) -> bool:
        return self.size.tied

    @property
    def cap(self) -> float:
        """Bound of the logits, see `models.loss.head_logits`."""
        return 0.0

    @property
    def attention_flops(self) -> Mapping[str, Any]:
        """Two products for each pair of tokens: half of all pairs and half of a token's own."""
        half = 2.0 * self.size.n_heads * self.size.head_dim
        return {"pair": half, "token": half}

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        of_media = ("is_visual", "visual", *(("is_newline",) if self.newline else ()))
        return {
            "entry": ("tokens", *(of_media if self.media else ())),
            "layers": ("positions", "segment_ids"),
            "exit": ("targets", "weights"),
        }

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {"entry": "llm", "layers": "llm", "exit": "llm"}

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a field for `items` rows of `tokens`."""
        if name == "visual" or name in self.inlets:
            return jax.ShapeDtypeStruct((items, tokens, self.size.width), self.dtype)
        if name not in FIELD_DTYPES:
            raise ValueError(
                f"the LLM has no field {name!r}; it reads {', '.join(FIELD_DTYPES)}, visual"
            )
        axes = (3,) if name == "positions" and self.size.mrope_sections else ()
        return jax.ShapeDtypeStruct((items, tokens, *axes), FIELD_DTYPES[name])

    def _linen_part(self, part: str) -> tuple[nn.Module, tuple[Any, ...]]:
        hidden = self.field_spec("visual", 1, 1)
        fields = [self.field_spec(name, 1, 1) for name in self.inputs[part]]
        if part == "entry":
            return DecoderEntry(self.size, self.dtype), tuple(fields)
        if part == "layers":
            return DecoderBlock(self.size, self.dtype, self.attend), (hidden, *fields)
        shape = (self.size.vocab, self.size.width)
        return DecoderExit(self.size), (hidden, jax.ShapeDtypeStruct(shape, jnp.float32))

    def layer(
        self, params: Any, x: Array, batch: Batch, mix: AttentionFunction | None = None
    ) -> Array:
        """Run one layer, with `mix` instead of the module's own attention if it is given."""
        fields = [batch[name] for name in self.inputs["layers"]]
        return apply(DecoderBlock(self.size, self.dtype, mix or self.attend), params, x, *fields)

    @property
    def inlets(self) -> Mapping[str, int]:
        """Number of layers that run before each edge between layers is read."""
        return {f"deepstack_{i}": i + 1 for i in range(self.deepstack)}

    def inlet(self, name: str, x: Array, features: Array, batch: Batch) -> Array:
        return x + features

    def _head(self, params: Any, x: Array, entry: Any) -> tuple[Array, Array]:
        table = entry["embedding"] if self.tied else None
        return apply(DecoderExit(self.size), params, x, table)

    def exit(self, params: Any, x: Array, batch: Batch, entry: Any = None) -> dict[str, Array]:
        """Return the microbatch's sums of weighted losses and weighted correct predictions."""
        x, table = self._head(params, x, entry)
        n = x.shape[0] * x.shape[1]
        return cross_entropy(
            x.reshape(n, self.size.width),
            table,
            batch["targets"].reshape(n),
            batch["weights"].reshape(n),
            logits_elements=self.size.logits_elements,
            objective=self.objective,
            cap=self.cap,
        )

    def logits(self, params: Any, x: Array, entry: Any = None) -> Array:
        """Return float32 logits [items, tokens, vocab] for evaluation and generation."""
        return head_logits(*self._head(params, x, entry), cap=self.cap)

    def memory(self, kind: str = "layers") -> KVMemory:
        return KVMemory(self.attend)
