"""FLOPs of the matrix products in instructions of an optimized HLO module.

A multiply-add counts two. Products are `dot`, calls of cuBLAS and calls of attention kernels.
"""

from __future__ import annotations

import re
from math import prod

from dflop_jax.aot.hlo_text import Instruction
from dflop_jax.profile.kernels import ATTENTION_PRODUCTS
from dflop_jax.records import token_pairs

CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
_CUDNN = "__cudnn$fmha"
# Products of the kernels of `models.delta_gpu`, of a chunk's keys with states or what is written.
_STATES_PRODUCTS = {"delta_states_gradient": 2, "delta_states": 2}
# Custom calls that compute no product.
_NO_PRODUCT = re.compile(
    r"Sharding|SPMD|TopK|topk|Topk|annotate|AllocateBuffer|PadToStatic|SliceToDynamic|cub\$|"
    r"DeviceSort|RngBitGenerator|MoveTo|xla\.gpu\.collective|command_buffer|AssumeGatherIndices"
)


def product_flops(i: Instruction, visible_pairs: float) -> float | None:
    """FLOPs of a matrix product or of a kernel that computes products; None of other instructions.

    Args:
      visible_pairs: share of a row's pairs of tokens that the attention kernels of `models` visit,
        which the text does not say: about half where attention is causal.
    """
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
        return pair_flops * visible_pairs * token_pairs(tokens) / tokens
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


def may_compute_products(i: Instruction) -> bool:
    """Whether an instruction without known FLOPs could be a product."""
    target = i.custom_call_target
    is_call = i.opcode == "custom-call" and not _NO_PRODUCT.search(target)
    return i.opcode == "convolution" or is_call


def product_dims(i: Instruction, kind: str) -> list[int]:
    """Dims of the left side of a product: "contracting" or "batch"."""
    text = i.attributes
    numbers = re.search(rf'"lhs_{kind}_dimensions":\s*\[([^\]]*)\]', text) or re.search(
        rf"lhs_{kind}_dims=\{{([^}}]*)\}}", text
    )
    return [int(n) for n in re.findall(r"\d+", numbers.group(1))] if numbers else []
