"""cuDNN's flash attention through jax: rows of one segment each, and packed rows on Hopper.

jax binds cuDNN in a private module; its public function supports neither packed rows nor separate
forward and backward calls. So the private parts are looked up here once; `AVAILABLE` is false if a
version of jax differs, and other kernels are chosen then. jax 0.10.2 computes the offsets of packed
keys with the number of query heads, which is wrong for grouped queries; they are computed here.

cuDNN gets packed rows as a list of segments of a static length: `SEGMENTS_PER_ROW` for each row,
which all rows share. Further segments are computed by `models/attention_gpu.py`, whose kernels end
at once if there are none. So every packing is correct, and rows with few segments are fast.

cuDNN's backward adds up the gradient of queries in any order unless a program is compiled with
`xla_gpu_exclude_nondeterministic_ops`. It then stores all scores (before cuDNN 9.25; see
cudnn-frontend's pull request 398), which is fine for tiles and impossible for packed rows. Of
several equal calls, XLA marks only the first as deterministic and does not find the others when
they run (IndexError); `ordered_backward`, for such programs only, marks every call.

Shape suffixes: as in `models/attention.py`; P slots of a batch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import attention_gpu

Array = jax.Array

# Average segments of a row in a batch; cuDNN starts blocks and stores sums for each.
SEGMENTS_PER_ROW = 16
_TOKEN_MULTIPLE = 64  # rows of one segment are padded to a multiple: cuDNN refuses some odd lengths
MAX_ELEMENTS = jnp.iinfo(jnp.int32).max  # limit for queries: offsets in packed rows are int32
# Seeds of dropout, which is off: the second one marks a deterministic backward.
_ANY_ORDER, _IN_ORDER = 0, 1_000_003


class _CudnnBinding(NamedTuple):
    """jax's two primitives, its mask types, and the options that never change."""

    forward: Any
    backward: Any
    masks: Any
    constant: dict[str, Any]


def _find_binding() -> _CudnnBinding | None:
    """Return the parts of jax's private module, or None if they are not as expected."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        lowering = inspect.signature(cudnn._dot_product_attention_fwd_cuda_lowering).parameters
        primitives = cudnn._dot_product_attention_fwd_p, cudnn._dot_product_attention_bwd_p
        layout = cudnn.AttentionLayout.BTNH.value
        masks = cudnn.MaskType
        configure = cudnn.create_dot_product_attention_backend_config
        if not {"seed", "is_bwd"} <= set(inspect.signature(configure).parameters):
            return None
        cudnn.create_dot_product_attention_backend_config = _add_deterministic_flag(configure)
    except (ImportError, AttributeError):
        return None
    arrays = ("ctx", "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets",
              "kv_offsets", "page_table_k", "page_table_v")  # fmt: skip
    constant = {"dropout_rate": 0.0, "variadic_args": (False, False), "layout": layout,
                "sliding_window_length": None}  # fmt: skip
    newer_options = {"score_mod_name": None, "score_mod_jaxpr": None}
    options = set(lowering) - {*arrays, "score_mod_args"}
    known_options = {*constant, "seed", "scale", "mask_type", "is_training"}
    if tuple(lowering)[: len(arrays)] != arrays or options - {*newer_options} != known_options:
        return None
    if not {m.name for m in masks} >= {"NO_MASK", "PADDING", "CAUSAL", "PADDING_CAUSAL"}:
        return None
    return _CudnnBinding(
        *primitives,
        masks,
        constant | {name: newer_options[name] for name in options & {*newer_options}},
    )


def _add_deterministic_flag(configure: Callable[..., str]) -> Callable[..., str]:
    """Wrap jax's function that writes a call's config for XLA: mark a backward as deterministic."""
    signature = inspect.signature(configure)

    @wraps(configure)
    def configured(*arguments: Any, **named: Any) -> str:
        text, arguments_by_name = (
            configure(*arguments, **named),
            signature.bind(*arguments, **named).arguments,
        )
        if not arguments_by_name["is_bwd"] or arguments_by_name["seed"] != _IN_ORDER:
            return text
        config = json.loads(text)
        config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return json.dumps(config)

    return configured


_BINDING = _find_binding()
AVAILABLE = _BINDING is not None


def list_segments(ids_BT: Array, slots: int) -> tuple[Array, Array, Array]:
    """List the segments of packed rows in order, up to the number of slots.

    A segment is a run of tokens of one id; padding (0) belongs to none.

    Returns:
      starts int32 [slots]: tokens of all rows before a segment, or all tokens for a free slot;
      lengths int32 [slots], 0 for a free slot; whether a token has a slot, bool [B, T].
    """
    previous_BT = jnp.pad(ids_BT[:, :-1], ((0, 0), (1, 0)))
    is_real = (ids_BT > 0).reshape(-1)
    # Padding gets the slot of the segment before it; before the first segment, -1.
    begins = is_real & (ids_BT != previous_BT).reshape(-1)
    slot = jnp.cumsum(begins, dtype=jnp.int32) - 1
    number = jnp.arange(slots, dtype=jnp.int32)[:, None]
    starts = jnp.sum(slot[None] < number, axis=1, dtype=jnp.int32)
    lengths = jnp.sum((slot[None] == number) & is_real[None], axis=1, dtype=jnp.int32)
    return starts, lengths, (is_real & (slot < slots)).reshape(ids_BT.shape)


def forward(
    q: Array, k: Array, v: Array, ids: Array | None, *, causal: bool, interpret: bool, scale: float
) -> tuple[Array, tuple[Array, ...]]:
    """Return (output of `models.attention.attention`, 0 at padding; arrays for `backward`)."""
    T = q.shape[1]
    if ids is None:
        q, k, v = map(_pad_tokens, (q, k, v))
        output, stats = call_forward(q, k, v, _row_lengths(q, T), causal, scale)
        return output[:, :T], (stats,)
    starts, lengths, has_slot = list_segments(ids, SEGMENTS_PER_ROW * len(ids))
    output, stats = call_forward(q, k, v, _segment_lengths(q, k, starts, lengths), causal, scale)
    pallas_output, log_sum = attention_gpu.forward(
        q, k, v, jnp.where(has_slot, 0, ids), causal=causal, interpret=interpret, scale=scale
    )
    return _select_output(has_slot, output, pallas_output), (stats, log_sum)


def backward(
    q: Array,
    k: Array,
    v: Array,
    ids: Array | None,
    output: Array,
    saved: tuple[Array, ...],
    dout: Array,
    *,
    causal: bool,
    interpret: bool,
    scale: float,
    seed: int = _ANY_ORDER,
) -> tuple[Array, Array, Array]:
    """Return gradients of queries, keys and values, 0 at padding, from the output of `forward`."""
    T = q.shape[1]
    if ids is None:
        q, k, v, output, dout = map(_pad_tokens, (q, k, v, output, dout))
        rows = _row_lengths(q, T)
        grads = call_backward(q, k, v, rows, saved[0], output, dout, causal, scale, seed)
        dq, dk, dv = (x[:, :T] for x in grads)
        return dq, dk, dv
    stats, log_sum = saved
    starts, lengths, has_slot = list_segments(ids, SEGMENTS_PER_ROW * len(ids))
    packed = _segment_lengths(q, k, starts, lengths)
    grads = call_backward(q, k, v, packed, stats, output, dout, causal, scale, seed)
    pallas_output = attention_gpu.backward(
        q, k, v, jnp.where(has_slot, 0, ids), output, log_sum, dout,
        causal=causal, interpret=interpret, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (_select_output(has_slot, a, b) for a, b in zip(grads, pallas_output, strict=True))
    return dq, dk, dv


def ordered_backward(*arrays: Any, **options: Any) -> tuple[Array, Array, Array]:
    """Run `backward` for a program whose equal inputs give equal bits."""
    return backward(*arrays, **options, seed=_IN_ORDER)


def _select_output(has_slot_BT: Array, cudnn: Array, pallas_output: Array) -> Array:
    # cuDNN writes no output outside of segments: the values there may not be finite.
    return jnp.where(has_slot_BT[:, :, None, None], cudnn, pallas_output)


def _pad_tokens(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _TOKEN_MULTIPLE), (0, 0), (0, 0)))


# Which tokens are in which row: (lengths of queries, of keys, offsets of queries, of keys), or ().


def _row_lengths(q: Array, tokens: int) -> tuple[Array, ...]:
    B, T = q.shape[:2]
    if tokens == T:
        return ()
    lengths = jnp.full(B, tokens, jnp.int32)
    return lengths, lengths


def _segment_lengths(q: Array, k: Array, starts_P: Array, lengths_P: Array) -> tuple[Array, ...]:
    """Return lengths [B, slots of a row] and offsets [B, slots + 1], counted in elements."""
    B, T = q.shape[:2]
    lengths = lengths_P.reshape(B, -1)
    starts = jnp.concatenate([starts_P, jnp.full(B, B * T, jnp.int32)]).reshape(B, -1)
    return lengths, lengths, *(starts * (x.shape[2] * x.shape[3]) for x in (q, k))


def _call_arguments(
    q: Array, rows: tuple[Array, ...], causal: bool, scale: float, seed: int = _ANY_ORDER
) -> tuple[Any, dict[str, Any]]:
    assert _BINDING is not None
    unused = jnp.zeros(0, q.dtype)
    arrays = (unused, *rows, *(unused,) * (6 - len(rows)))  # the bias is first, pages are last
    padding = ["PADDING"] if rows else []
    mask = "_".join([*padding, *(["CAUSAL"] if causal else [])]) or "NO_MASK"
    options = {"scale": scale, "mask_type": _BINDING.masks[mask], "seed": seed}
    return arrays, _BINDING.constant | options


def call_forward(
    q: Array, k: Array, v: Array, rows: tuple[Array, ...], causal: bool, scale: float
) -> tuple[Array, Array]:
    """Run cuDNN's forward; return (output, log-sums float32 [rows or slots, N, T])."""
    assert _BINDING is not None
    arrays, options = _call_arguments(q, rows, causal, scale)
    output, stats = _BINDING.forward.bind(q, k, v, *arrays, **options, is_training=True)
    return output, stats


def call_backward(
    q: Array,
    k: Array,
    v: Array,
    rows: tuple[Array, ...],
    stats: Array,
    output: Array,
    dout: Array,
    causal: bool,
    scale: float,
    seed: int,
) -> tuple[Array, Array, Array]:
    """Run cuDNN's backward; return the gradients of queries, keys and values."""
    assert _BINDING is not None
    arrays, options = _call_arguments(q, rows, causal, scale, seed)
    dq, dk, dv = _BINDING.backward.bind(q, k, v, *arrays, stats, output, dout, **options)
    return dq, dk, dv
