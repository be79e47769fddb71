"""Decoder of Qwen3.5: gated delta nets (arXiv 2412.06464), and between them attention with gated
outputs (arXiv 2505.06708)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import AttentionFunction
from models.decoder import DecoderModule
from models.delta import mix_tokens
from models.delta_memory import DeltaMemory
from models.delta_states import choose_state_scan
from models.layers import Linear, RMSNorm, apply, named_init, normal
from models.linen_module import Batch
from models.memory import KVMemory
from models.qwen3_5_sizes import FULL, LINEAR, HybridSize
from models.rotary import angles_of, rotate

Array = jax.Array
A_LOG, DT_BIAS = "A_log", "dt_bias"  # parameters of decays
MIN_INITIAL_DECAY, MAX_INITIAL_DECAY = 0.01, 16.0  # of A in fresh models


class ConvolutionTaps(nn.Module):
    """Weights of a convolution of each channel over tokens [taps, heads, size]."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> Array:
        init = named_init(normal(self.shape[0] ** -0.5), None, "heads", None)
        taps: Array = self.param("taps", init, self.shape, jnp.float32)
        return taps


class HybridBlock(nn.Module):
    """Pre-norm decoder layer of one kind; call `mix` like `attention` or `mix_tokens`."""

    size: HybridSize
    kind: str
    dtype: jnp.dtype
    mix: Callable[..., Array]

    @nn.compact
    def __call__(self, x: Array, segment_ids: Array, positions: Array | None = None) -> Array:
        s = self.size
        linear = partial(Linear, dtype=self.dtype)
        norm = partial(RMSNorm, s.norm_eps, offset=s.norm_offset)
        width, embed = (s.width,), ("embed",)
        residual = (2 * s.n_layers) ** -0.5  # keeps the sum of all branches of order one

        h = norm(name="attn_norm")(x)
        if self.kind == FULL:
            assert positions is not None, "attention needs positions"
            h = self._attention(linear, h, segment_ids, positions)
        else:
            h = self._delta_net(linear, h, segment_ids)
        std = residual * s.width**-0.5
        x = x + linear(h.shape[2:], width, ("heads", None), embed, std=std, name="out")(h)

        h = norm(name="mlp_norm")(x)
        gate = linear(width, (s.mlp,), embed, ("mlp",), name="gate")(h)
        up_branch = linear(width, (s.mlp,), embed, ("mlp",), name="up")(h)
        std = residual * s.mlp**-0.5
        down_projection = linear((s.mlp,), width, ("mlp",), embed, std=std, name="down")
        return x + down_projection(jax.nn.silu(gate) * up_branch)

    def _attention(
        self, linear: Callable[..., nn.Module], h: Array, segment_ids: Array, positions: Array
    ) -> Array:
        """Attend; one matrix has every head's query next to its gate."""
        s = self.size
        norm = partial(RMSNorm, s.norm_eps, (None,), offset=s.norm_offset)
        width, embed, kv_names = (s.width,), ("embed",), ("kv_heads", None)
        both = linear(width, (s.n_heads, 2 * s.head_dim), embed, ("heads", None), name="query")(h)
        kv_shape = s.n_kv_heads, s.head_dim
        k = linear(width, kv_shape, embed, kv_names, name="key")(h)
        v = linear(width, kv_shape, embed, kv_names, name="value")(h)
        q, gate = jnp.split(both, 2, axis=-1)
        q, k = norm(name="query_norm")(q), norm(name="key_norm")(k)
        angles = angles_of(positions, s.rotary_pairs, s.rope_theta, s.mrope_sections)
        output = self.mix(rotate(q, angles), rotate(k, angles), v, segment_ids, causal=True)
        return output * jax.nn.sigmoid(gate)

    def _delta_net(self, linear: Callable[..., nn.Module], h: Array, segment_ids: Array) -> Array:
        d = self.size.delta
        keys, values = (d.key_heads, d.key_size), (d.value_heads, d.value_size)
        names = ("heads", None)
        width, embed = (self.size.width,), ("embed",)
        qkv, taps = [], []
        for name, shape in {"query": keys, "key": keys, "value": values}.items():
            qkv.append(linear(width, shape, embed, names, name=name)(h))
            taps.append(ConvolutionTaps((d.taps, *shape), name=f"{name}_conv")())
        gate = linear(width, values, embed, names, name="out_gate")(h)
        write = linear(width, (d.value_heads,), embed, ("heads",), name="write")(h)
        step = linear(width, (d.value_heads,), embed, ("heads",), name="step")(h)
        a_log = self.param(A_LOG, named_init(_log_decays, "heads"), (d.value_heads,), jnp.float32)
        ones = named_init(nn.initializers.ones, "heads")
        dt_bias = self.param(DT_BIAS, ones, (d.value_heads,), jnp.float32)
        decay = -jnp.exp(a_log)[None, None] * jax.nn.softplus(
            step.astype(jnp.float32) + dt_bias[None, None]
        )
        beta = jax.nn.sigmoid(write.astype(jnp.float32))
        output = self.mix(tuple(qkv), tuple(taps), decay, beta, segment_ids)
        output = RMSNorm(self.size.norm_eps, (None,), name="delta_norm")(output)
        return (output.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(h.dtype)


def _log_decays(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, MIN_INITIAL_DECAY, MAX_INITIAL_DECAY))


@dataclass(frozen=True)
class HybridModule(DecoderModule):
    """See `DecoderModule`; layers are of the kinds "linear" and "full"."""

    size: HybridSize

    float32_names = (A_LOG, DT_BIAS)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        return self.size.kinds

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        base_inputs = super().inputs
        reads = {LINEAR: ("segment_ids",), FULL: ("segment_ids", "positions")}
        layer_inputs = {kind: reads[kind] for kind in reads if kind in self.size.kinds}
        return {"entry": base_inputs["entry"], **layer_inputs, "exit": base_inputs["exit"]}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return dict.fromkeys(self.inputs, "llm")

    @property
    def attention_flops(self) -> Mapping[str, Any]:
        """A delta net reads a state twice and writes it once per token."""
        d = self.size.delta
        of_token = 6.0 * d.value_heads * d.key_size * d.value_size
        return {FULL: super().attention_flops, LINEAR: {"token": of_token}}

    def memory(self, kind: str = FULL) -> KVMemory | DeltaMemory:  # type: ignore[override]
        return super().memory(kind) if kind == FULL else DeltaMemory(self.size.delta.taps)

    def _linen_part(self, part: str) -> tuple[nn.Module, tuple[Any, ...]]:
        if part not in (LINEAR, FULL):
            return super()._linen_part(part)
        hidden = self.field_spec("visual", 1, 1)
        fields = [self.field_spec(name, 1, 1) for name in self.inputs[part]]
        return self._block(part), (hidden, *fields)

    def _block(self, kind: str, mix: AttentionFunction | None = None) -> HybridBlock:
        d = self.size.delta
        states = choose_state_scan(self.attention_kernel, self.chip, d.key_size, d.value_size)
        default_mix = self.attend if kind == FULL else partial(mix_tokens, states=states)
        return HybridBlock(self.size, kind, self.dtype, mix or default_mix)

    def layer(  # type: ignore[override]
        self,
        params: Any,
        x: Array,
        batch: Batch,
        mix: AttentionFunction | None = None,
        *,
        kind: str,
    ) -> Array:
        fields = [batch[name] for name in self.inputs[kind]]
        return apply(self._block(kind, mix), params, x, *fields)
