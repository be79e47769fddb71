"""What a compiled program computes and sends on one device, read from its optimized HLO.

Matrix products count a multiply-add as two FLOPs, wherever they stand: as `dot`, inside fusions
(Triton's among them), as calls of cuBLAS and of attention kernels, in called computations, and in
loops as often as these run. Elementwise work counts nothing. What cannot be counted is named: loops
of unknown length, which count once, and kernels that nothing is known of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from dflop_jax.aot.hlo_text import ALL_CALLS, Instruction, parse_hlo
from dflop_jax.profile.kernels import ATTENTION_PRODUCTS
from dflop_jax.records import pairs

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
_CUDNN = "__cudnn$fmha"
# Products of the kernels of `models.delta_gpu`, of a chunk's keys with states or what is written.
_STATES_PRODUCTS = {"delta_states_gradient": 2, "delta_states": 2}
# Custom calls that compute no product.
_NO_PRODUCT = re.compile(
    r"Sharding|SPMD|TopK|topk|Topk|annotate|AllocateBuffer|PadToStatic|SliceToDynamic|cub\$|"
    r"DeviceSort|RngBitGenerator|MoveTo|xla\.gpu\.collective|command_buffer|AssumeGatherIndices"
)
# Beginnings of collectives whose type holds what they read, too.
_HOLD_OPERANDS = ("all-gather-start", "collective-permute-start", "reduce-scatter-start")


@dataclass(frozen=True)
class HloCost:
    """What one run takes on one device.

    Attributes:
      flops: of all products.
      float32_flops: of those with an operand of 32 bits or more.
      collectives: bytes of the larger side of each collective on one device, in all, by kind.
      unknown_loops: loops whose length the text does not say.
      unknown_kernels: custom calls that nothing is known of.
    """

    flops: float
    float32_flops: float
    collectives: Mapping[str, float]
    unknown_loops: int
    unknown_kernels: frozenset[str]


def hlo_cost(text: str, visible_pairs: float = 1.0) -> HloCost:
    """Cost of the program that `compiled.as_text()` shows.

    Args:
      seen_pairs: share of a row's pairs of tokens that the attention kernels of `models` visit,
        which the text does not say: about half where attention is causal.

    Raises:
      ValueError: the text is not that of an HLO module.
    """
    total = float32 = 0.0
    collectives: dict[str, float] = {}
    unknown_loops, unknown_kernels = 0, set()
    for i, n_runs in parse_hlo(text).walk(ALL_CALLS):
        opcode = i.opcode.removesuffix("-start")
        unknown_loops += i.trip_count is None
        if opcode in COLLECTIVES:
            collectives[opcode] = collectives.get(opcode, 0.0) + n_runs * transfer_bytes(i)
        elif opcode in ("dot", "convolution", "custom-call"):
            flops, target = product_flops(i, visible_pairs), i.custom_call_target
            if flops is not None:
                total += n_runs * flops
                if any(a.dtype in ("f32", "f64") for a in i.reads[:2]):
                    float32 += n_runs * flops
            elif opcode == "convolution" or not _NO_PRODUCT.search(target):
                unknown_kernels.add(target or opcode)
    return HloCost(total, float32, collectives, unknown_loops, frozenset(unknown_kernels))


def product_flops(i: Instruction, visible_pairs: float) -> float | None:
    """FLOPs of a product or of a kernel that is known; None of others."""
    target = i.custom_call_target
    if i.opcode == "dot" or target in CUBLAS:
        depth = prod(i.reads[0].shape[d] for d in product_dims(i, "contracting"))
        return 2.0 * i.arrays[0].size * depth
    if target.startswith(_CUDNN):
        # Scores of all pairs, and of them the products. Of causal attention cuDNN computes the half
        # that counts.
        scores = re.search(
            r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^\]]*)\]', i.attributes
        )
        if scores is None:
            return None
        n_pairs = prod(int(n) for n in re.findall(r"\d+", scores.group(1)))
        visible_share = 0.5 if re.search(r'"mask_type":\s*"\w*CAUSAL', i.attributes) else 1.0
        return 2.0 * _attention_products(i) * visible_share * n_pairs * i.reads[0].shape[-1]
    if pair_flops := attention_pair_flops(i):
        tokens = i.reads[0].shape[1]
        return pair_flops * visible_pairs * pairs(tokens) / tokens
    for name, n_products in _STATES_PRODUCTS.items():
        if name in i.attributes:
            return 2.0 * n_products * i.reads[0].size * i.arrays[0].shape[-2]
    return None


def attention_pair_flops(i: Instruction) -> float:
    """FLOPs of an attention kernel for one pair of each of its tokens; 0 of other instructions."""
    products = _attention_products(i)
    return 2.0 * products * i.reads[0].size if products else 0.0


def _attention_products(i: Instruction) -> int:
    if i.custom_call_target.startswith(_CUDNN):
        is_backward = "Backward" in i.custom_call_target
        return ATTENTION_PRODUCTS[f"dot_product_attention_{'bwd' if is_backward else 'fwd'}"]
    return next((n for name, n in ATTENTION_PRODUCTS.items() if name in i.attributes), 0)


def product_dims(i: Instruction, kind: str) -> list[int]:
    """Dims of the left side of a product: "contracting" or "batch"."""
    text = i.attributes
    numbers = re.search(rf'"lhs_{kind}_dimensions":\s*\[([^\]]*)\]', text) or re.search(
        rf"lhs_{kind}_dims=\{{([^}}]*)\}}", text
    )
    return [int(n) for n in re.findall(r"\d+", numbers.group(1))] if numbers else []


def transfer_bytes(i: Instruction) -> float:
    """Bytes of the larger side of a collective on one device."""
    read_bytes = sum(o.n_bytes for o in i.operands)
    written = i.n_bytes - (read_bytes if i.opcode in _HOLD_OPERANDS else 0.0)
    return max(read_bytes, written)
