"""Decoder of Gemma 3 (arXiv 2503.19786) and Gemma 4: layers with a sliding window and global ones,
norms before and after attention and MLP, normed queries and keys, pictures whose tokens see each
other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import AttentionFunction, attention, last_visible_tokens
from models.attention_choice import skips
from models.attention_kernels import TokenMask
from models.decoder import DecoderExit, DecoderModule
from models.embedding import embed
from models.gemma_sizes import GemmaSize, HeadsSize
from models.layers import Linear, RMSNorm, apply, named_init, normal, tanh_gelu, untrained_param
from models.linen_module import Batch
from models.memory import KVMemory
from models.rotary import angles_of, rotate

Array = jax.Array
_AHEAD_COUNT = "seen_ahead"


def _pair_count_name(heads: HeadsSize) -> str:
    return f"seen_in_{heads.window}" if heads.window else "seen"


class GemmaEntry(nn.Module):
    """Token embeddings times the root of the width, rounded to the embeddings' dtype; unscaled
    features of encoders replace them where `is_visual`."""

    size: GemmaSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, tokens: Array, is_visual: Array | None = None, visual: Array | None = None
    ) -> Array:
        s = self.size
        init = named_init(normal(s.width**-0.5), "vocab", "embed")
        table = self.param("embedding", init, (s.vocab, s.width), jnp.float32)
        x = embed(table, tokens).astype(self.dtype) * jnp.asarray(s.width**0.5, self.dtype)
        if is_visual is None or visual is None:
            return x
        return jnp.where(is_visual[:, :, None], visual.astype(self.dtype), x)


class GemmaBlock(nn.Module):
    """A layer of a kind; `attend` has the signature of `attention`."""

    size: GemmaSize
    kind: str
    dtype: jnp.dtype
    attend: AttentionFunction = attention

    @nn.compact
    def __call__(
        self, x: Array, positions: Array, segment_ids: Array, is_visual: Array | None = None
    ) -> Array:
        s, heads, dtype = self.size, self.size.heads(self.kind), self.dtype
        linear = partial(Linear, dtype=dtype)
        norm = partial(RMSNorm, s.norm_eps, offset=s.norm_offset)
        width, mlp, embed_names = (s.width,), (s.mlp,), ("embed",)
        q_shape, q_names = (heads.n_heads, heads.head_dim), ("heads", None)
        kv_shape, kv_names = (heads.n_kv_heads, heads.head_dim), ("kv_heads", None)
        half = heads.head_dim // 2

        h = norm(name="attn_norm")(x)
        q = linear(width, q_shape, embed_names, q_names, name="query")(h)
        k = v = linear(width, kv_shape, embed_names, kv_names, name="key")(h)
        if not heads.values_are_keys:
            v = linear(width, kv_shape, embed_names, kv_names, name="value")(h)
        q = norm(names=(None,), name="query_norm")(q)
        k = norm(names=(None,), name="key_norm")(k)
        if s.value_norm:
            v = norm(names=(None,), scaled=False)(v)
        angles_fn = partial(angles_of, turned=heads.rotated_pairs, factor=heads.position_factor)
        angles = angles_fn(positions, half, heads.theta)
        q, k = rotate(q, angles), rotate(k, angles)
        last_visible = None if is_visual is None else last_visible_tokens(is_visual, segment_ids)
        token_mask = TokenMask(segment_ids, last_visible)
        h = self.attend(q, k, v, token_mask, causal=True, window=heads.window, scale=heads.scale)
        h = linear(q_shape, width, q_names, embed_names, name="out")(h)
        x = x + norm(name="attn_out_norm")(h)

        h = norm(name="mlp_norm")(x)
        gate = linear(width, mlp, embed_names, ("mlp",), name="gate")(h)
        up_branch = linear(width, mlp, embed_names, ("mlp",), name="up")(h)
        h = linear(mlp, width, ("mlp",), embed_names, name="down")(tanh_gelu(gate) * up_branch)
        x = x + norm(name="mlp_out_norm")(h)
        if s.layer_scalar:
            x = x * untrained_param(self, "layer_scalar", (1,), 1.0).astype(dtype)[None, None]
        return x


@dataclass(frozen=True)
class GemmaModule(DecoderModule):
    """The LLM as a module of the contract; see `DecoderModule`."""

    size: GemmaSize  # type: ignore[assignment]

    @property
    def cap(self) -> float:
        return self.size.cap

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        return self.size.kinds

    @property
    def float32_names(self) -> frozenset[str]:
        """Names of float32 parameters, which are not trained."""
        return frozenset({"layer_scalar"}) if self.size.layer_scalar else frozenset()

    def _heads(self) -> dict[str, HeadsSize]:
        return {kind: self.size.heads(kind) for kind in dict.fromkeys(self.size.kinds)}

    @property
    def skips(self) -> Mapping[str, bool]:  # type: ignore[override]
        kernel_choice = self.attention_kernel, self.chip, self.dtype
        return {
            kind: skips(*kernel_choice, heads.head_dim) for kind, heads in self._heads().items()
        }

    def content(self, tokens: int, features_by_edge: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Count, by window, pairs of tokens in which one sees itself or an earlier one; and pairs
        in a picture in which one sees a later one."""
        counts = {}
        for heads in self._heads().values():
            pairs_per_token = min(heads.window or tokens, tokens)
            counts[_pair_count_name(heads)] = (
                pairs_per_token * (pairs_per_token + 1) // 2
                + (tokens - pairs_per_token) * pairs_per_token
            )
            if heads.bidirectional_images and self.media:
                counts[_AHEAD_COUNT] = sum(
                    n * (n - 1) // 2 for n in features_by_edge.get("visual", ())
                )
        return counts

    @property
    def attention_flops(self) -> Mapping[str, Any]:
        """By kind: two products for each pair."""
        flops = {}
        for kind, heads in self._heads().items():
            count_names = (
                _pair_count_name(heads),
                *[_AHEAD_COUNT] * (heads.bidirectional_images and self.media),
            )
            flops[kind] = dict.fromkeys(count_names, 4.0 * heads.n_heads * heads.head_dim)
        return flops

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        names: dict[str, tuple[str, ...]] = {
            "entry": ("tokens", *(("is_visual", "visual") if self.media else ())),
            "exit": ("targets", "weights"),
        }
        for kind in dict.fromkeys(self.size.kinds):
            reads_media = self.media and self.size.heads(kind).bidirectional_images
            names[kind] = ("positions", "segment_ids", *(("is_visual",) if reads_media else ()))
        return names

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return dict.fromkeys(self.inputs, "llm")

    def _linen_part(self, part: str) -> tuple[nn.Module, tuple[Any, ...]]:
        hidden = self.field_spec("visual", 1, 1)
        fields = tuple(self.field_spec(name, 1, 1) for name in self.inputs[part])
        if part == "entry":
            return GemmaEntry(self.size, self.dtype), fields
        if part == "exit":
            table = jax.ShapeDtypeStruct((self.size.vocab, self.size.width), jnp.float32)
            return DecoderExit(self.size), (hidden, table)
        return GemmaBlock(self.size, part, self.dtype, self.attend), (hidden, *fields)

    def layer(
        self,
        params: Any,
        x: Array,
        batch: Batch,
        mix: AttentionFunction | None = None,
        *,
        kind: str = "",
    ) -> Array:
        fields = [batch[name] for name in self.inputs[kind]]
        block = GemmaBlock(self.size, kind, self.dtype, mix or self.attend)
        return apply(block, params, x, *fields)

    def memory(self, kind: str = "") -> KVMemory:
        return KVMemory(self.attend, self.size.heads(kind).window)
