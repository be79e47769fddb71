"""What a compiled program computes and sends on one device, read from its optimized HLO.

Matrix products count a multiply-add as two FLOPs, wherever they stand: as `dot`, inside fusions
(Triton's among them), as calls of cuBLAS and of attention kernels, in called computations, and in
loops as often as these run. Elementwise work counts nothing. What cannot be counted is named: loops
of unknown length, which count once, and kernels that nothing is known of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod

from dflop_jax.gpu_compile.hlo_text import ArrayType, Computation, Instruction, parse_hlo
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

    flops: float = 0.0
    float32_flops: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)
    unknown_loops: int = 0
    unknown_kernels: frozenset[str] = frozenset()

    def plus(self, other: HloCost, times: float = 1.0) -> HloCost:
        """The sum with another that runs `times` times."""
        collectives = dict(self.collectives)
        for kind, n_bytes in other.collectives.items():
            collectives[kind] = collectives.get(kind, 0.0) + times * n_bytes
        return HloCost(
            self.flops + times * other.flops,
            self.float32_flops + times * other.float32_flops,
            collectives,
            self.unknown_loops + other.unknown_loops,
            self.unknown_kernels | other.unknown_kernels,
        )


def hlo_cost(text: str, seen_pairs: float = 1.0) -> HloCost:
    """Cost of the program that `compiled.as_text()` shows.

    Args:
      seen_pairs: share of a row's pairs of tokens that the attention kernels of `models` visit,
        which the text does not say: about half where attention is causal.

    Raises:
      ValueError: the text is not that of an HLO module.
    """
    module = parse_hlo(text)

    @cache
    def of(name: str) -> HloCost:
        computation = module.computations.get(name, {})
        total = HloCost()
        for instruction in computation.values():
            cost = _own_cost(computation, instruction, seen_pairs)
            times, unknown = runs(instruction)
            inside = [of(c) for c in bodies(instruction)]
            if instruction.opcode == "conditional" and inside:
                inside = [max(inside, key=lambda c: c.flops)]
            for each in inside:
                cost = cost.plus(each, times)
            total = total.plus(cost).plus(HloCost(unknown_loops=int(unknown)))
        return total

    return of(module.entry)


def bodies(instruction: Instruction) -> Iterator[str]:
    """Computations that an instruction runs as a whole; those that it applies to single elements
    (of a reduction, a sort) hold no product. The end of an asynchronous call names its beginning's.
    """
    if instruction.opcode.endswith(("-done", "-update")):
        return
    roles = {
        "fusion": ("calls",),
        "call": ("to_apply", "calls"),
        "while": ("body", "condition"),
        "conditional": ("branch_computations", "true_computation", "false_computation"),
        "custom-call": ("called_computations",),
    }.get(instruction.opcode, ("calls",))
    for role in roles:
        yield from instruction.called.get(role, ())


def runs(instruction: Instruction) -> tuple[float, bool]:
    """How often an instruction's computations run, and whether that is a guess."""
    if instruction.opcode != "while":
        return 1.0, False
    trip_count = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', instruction.attributes)
    return (float(trip_count.group(1)), False) if trip_count else (1.0, True)


def _own_cost(computation: Computation, instruction: Instruction, seen_pairs: float) -> HloCost:
    """Cost of an instruction without what it calls."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        return HloCost(collectives={opcode: moved_bytes(computation, instruction)})
    if opcode not in ("dot", "convolution", "custom-call"):
        return HloCost()
    flops = product_flops(computation, instruction, seen_pairs)
    if flops is None:
        target = instruction.custom_call_target
        known = opcode == "custom-call" and _NO_PRODUCT.search(target)
        return HloCost(unknown_kernels=frozenset([] if known else [target or opcode]))
    is_wide = any(a.dtype in ("f32", "f64") for a in operands(computation, instruction)[:2])
    return HloCost(flops, flops if is_wide else 0.0)


def product_flops(
    computation: Computation, instruction: Instruction, seen_pairs: float
) -> float | None:
    """FLOPs of a product or of a kernel that is known; None of others."""
    target = instruction.custom_call_target
    if instruction.opcode == "dot" or target in CUBLAS:
        lhs = operands(computation, instruction)[0]
        depth = prod(lhs.shape[i] for i in dims(instruction, "contracting"))
        return 2.0 * instruction.arrays[0].size * depth
    if target.startswith(_CUDNN):
        # Scores of all pairs, and of them the products. Of causal attention cuDNN computes the half
        # that counts.
        scores = re.search(r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^\]]*)\]',
                          instruction.attributes)  # fmt: skip
        if scores is None:
            return None
        n_pairs = prod(int(n) for n in re.findall(r"\d+", scores.group(1)))
        head_dim = operands(computation, instruction)[0].shape[-1]
        seen = 0.5 if re.search(r'"mask_type":\s*"\w*CAUSAL', instruction.attributes) else 1.0
        return 2.0 * _attention_products(instruction) * seen * n_pairs * head_dim
    if pair_flops := attention_pair_flops(computation, instruction):
        tokens = operands(computation, instruction)[0].shape[1]
        return pair_flops * seen_pairs * pairs(tokens) / tokens
    for name, n_products in _STATES_PRODUCTS.items():
        if name in instruction.attributes:
            written, keys = operands(computation, instruction)[0], instruction.arrays[0].shape[-2]
            return 2.0 * n_products * written.size * keys
    return None


def attention_pair_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of an attention kernel for one pair of each of its tokens; 0 of other instructions."""
    products = _attention_products(instruction)
    return 2.0 * products * operands(computation, instruction)[0].size if products else 0.0


def _attention_products(instruction: Instruction) -> int:
    if instruction.custom_call_target.startswith(_CUDNN):
        back = "Backward" in instruction.custom_call_target
        return ATTENTION_PRODUCTS[f"dot_product_attention_{'bwd' if back else 'fwd'}"]
    named = (n for name, n in ATTENTION_PRODUCTS.items() if name in instruction.attributes)
    return next(named, 0)


def operands(computation: Computation, instruction: Instruction) -> list[ArrayType]:
    """Arrays that an instruction reads, the first of each operand."""
    by_operand = (computation[name].arrays for name in instruction.operands if name in computation)
    return [arrays[0] for arrays in by_operand if arrays]


def dims(instruction: Instruction, kind: str) -> list[int]:
    """Dims of the left side of a product: "contracting" or "batch"."""
    text = instruction.attributes
    numbers = re.search(rf'"lhs_{kind}_dimensions":\s*\[([^\]]*)\]', text) or re.search(
        rf"lhs_{kind}_dims=\{{([^}}]*)\}}", text
    )
    return [int(n) for n in re.findall(r"\d+", numbers.group(1))] if numbers else []


def moved_bytes(computation: Computation, instruction: Instruction) -> float:
    """Bytes of the larger side of a collective on one device."""
    read = sum(
        a.n_bytes
        for name in instruction.operands
        if name in computation
        for a in computation[name].arrays
    )
    made = sum(a.n_bytes for a in instruction.arrays)
    if instruction.opcode in _HOLD_OPERANDS:
        made -= read
    return max(read, made)
