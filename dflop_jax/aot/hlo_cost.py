"""Cost of a compiled program on one device, read from its optimized HLO: the kernels that it
launches (priced by `profile.kernels.program_s`), their FLOPs (2 per multiply-add), and the bytes of
collectives.

A fusion reads only the used part of each operand (a slice of a stack, looked-up rows) and writes
its results; an in-place update writes only the changed part. Loop bodies count once per iteration.
Collectives are priced as if they did not overlap with other kernels. Loops of unknown length count
one iteration; the cost reports them and unknown kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dflop_jax.aot.hlo_text import KERNEL_CALLS, Computation, HloModule, Instruction
from dflop_jax.profile.kernels import ATTENTION_PRODUCTS, Kernel, Kind, in_blocks, query_size
from dflop_jax.records import token_pairs

# Dtypes of products; others are priced as float32.
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    **dict.fromkeys(("f8e4m3fn", "f8e5m2"), "float8"),
}
# Collectives that are priced as all-gather.
_GATHERS = (
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
_COLLECTIVES = {
    "all-reduce": Kind.REDUCE,
    "collective-permute": Kind.SEND,
    **dict.fromkeys(_GATHERS, Kind.GATHER),
}
# Async collective starts whose result type also contains their operands.
_RESULT_HAS_OPERANDS = ("all-gather-start", "collective-permute-start", "reduce-scatter-start")
# Instructions that launch no kernel.
_NO_KERNEL = frozenset(
    {
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "iota",
        "async-update",
        "add-dependency",
        "domain",
    }
)
_WORKSPACE = ("s8", "u8")  # dtypes of workspaces for libraries
_SLICE_OPS = ("dynamic-slice", "slice")
# Operations that move arrays without computing.
_COPY_OPS = frozenset(
    {
        "parameter",
        "constant",
        "bitcast",
        "copy",
        "transpose",
        "reshape",
        "slice",
        "dynamic-slice",
        "pad",
        "dynamic-update-slice",
        "concatenate",
        "broadcast",
        "tuple",
        "convert",
        "get-tuple-element",
    }
)
_BACKWARD = re.compile(r"Backward|gradient")
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
_CUDNN, _MOSAIC = "__cudnn$fmha", "mosaic_gpu"
_LIBRARIES = (_CUDNN, _MOSAIC)
# Number of products (keys of a chunk with states or written values) in kernels of `delta_gpu`.
_STATES_PRODUCTS = {"delta_states_gradient": 2, "delta_states": 2}
# Custom calls without matrix products.
_NO_PRODUCT = re.compile(
    r"Sharding|SPMD|TopK|topk|Topk|annotate|AllocateBuffer|PadToStatic|SliceToDynamic|cub\$|"
    r"DeviceSort|RngBitGenerator|MoveTo|xla\.gpu\.collective|command_buffer|AssumeGatherIndices"
)


@dataclass(frozen=True)
class ProgramCost:
    """Cost of one run of a program on one device."""

    kernels: tuple[Kernel, ...]  # distinct kernels with their number of launches
    collectives: Mapping[str, float]  # bytes of the larger of input and output, by kind
    unknown_loops: int  # number of loops without a known trip count
    unknown_kernels: frozenset[str]  # targets of calls with unknown FLOPs

    @property
    def flops(self) -> float:
        return sum(k.repeats * k.flops for k in self.kernels)

    @property
    def float32_flops(self) -> float:
        """FLOPs of products with a float32 operand."""
        return sum(k.repeats * k.flops for k in self.kernels if k.dtype == "float32")


def program_cost(
    module: HloModule, visible_pairs: float = 1.0, *, content: bool = True
) -> ProgramCost:
    """Return the cost of a program. `visible_pairs`: share of a row's token pairs that the
    attention kernels of `models` compute, about 0.5 if causal; `content`: whether attention kernels
    count FLOPs and bytes, or only bytes."""
    kernels: Counter[Kernel] = Counter()
    collectives: Counter[str] = Counter()
    unknown_loops, unknown_kernels = 0, set()
    for i, n_runs in module.walk():
        opcode = i.opcode.removesuffix("-start")
        unknown_loops += i.trip_count is None
        if opcode in _COLLECTIVES:
            collectives[opcode] += n_runs * _transfer_bytes(i)  # type: ignore[assignment]
        elif _may_compute_products(i) and _product_flops(i, visible_pairs) is None:
            unknown_kernels.add(i.custom_call_target or opcode)
        if i.opcode not in KERNEL_CALLS and (kernel := _kernel(module, i, visible_pairs)):
            bare = kernel.kind in (Kind.ATTENTION, Kind.ATTENTION_BACKWARD) and not content
            kernels[replace(kernel, flops=0.0) if bare else kernel] += n_runs
    each = tuple(replace(k, repeats=n) for k, n in kernels.items())
    return ProgramCost(each, collectives, unknown_loops, frozenset(unknown_kernels))


def _kernel(module: HloModule, i: Instruction, visible_pairs: float) -> Kernel | None:
    """Return the kernel that an instruction launches, if any."""
    opcode = i.opcode.removesuffix("-start")
    if opcode in _COLLECTIVES:
        group, stride = _replica_group(i)
        if group == 1:
            return None
        return Kernel(_COLLECTIVES[opcode], 0.0, _transfer_bytes(i), group=group, stride=stride)
    if i.opcode in _NO_KERNEL or i.opcode.endswith("-done"):
        return None
    if opcode == "fusion":
        return _fusion_kernel(module, module.computations[i.called[0]])
    if i.opcode == "dot" or i.custom_call_target in _CUBLAS:
        return _product_kernel(i)
    n_bytes = sum(o.n_bytes for o in dict.fromkeys(i.operands))
    n_bytes += sum(a.n_bytes for a in i.arrays if a.dtype not in _WORKSPACE)
    if i.opcode == "custom-call":
        flops = _product_flops(i, visible_pairs)
        if flops is None:
            return Kernel(Kind.ELEMENTWISE, 0.0, n_bytes)
        is_backward = _BACKWARD.search(i.custom_call_target) or _BACKWARD.search(i.attributes)
        dtype = _DTYPES.get(i.reads[0].dtype, "float32")
        products = _attention_products(i)
        pair_flops = 2.0 * products * _query_size(i) if products else 0.0
        kind = Kind.ATTENTION_BACKWARD if is_backward else Kind.ATTENTION
        library = i.custom_call_target.startswith(_LIBRARIES)
        return Kernel(kind, flops, n_bytes, dtype=dtype, pair_flops=pair_flops, library=library)
    if i.opcode in _SLICE_OPS:
        return Kernel(Kind.COPY, 0.0, 2 * i.arrays[0].n_bytes)
    if i.opcode == "dynamic-update-slice":
        return Kernel(Kind.COPY, 0.0, 2 * i.operands[1].arrays[0].n_bytes)
    if i.opcode in ("gather", "scatter"):
        lookup_values = i.arrays[0] if i.opcode == "gather" else i.reads[-1]
        return Kernel(Kind.LOOKUP, 0.0, 2 * lookup_values.n_bytes)
    return Kernel(Kind.COPY if opcode in _COPY_OPS else Kind.ELEMENTWISE, 0.0, n_bytes)


def _product_flops(i: Instruction, visible_pairs: float) -> float | None:
    """Return an instruction's FLOPs of matrix products; None if it has none."""
    target = i.custom_call_target
    if i.opcode == "dot" or target in _CUBLAS:
        depth = prod(i.reads[0].shape[d] for d in _product_dims(i, "contracting"))
        return 2.0 * i.arrays[0].size * depth
    if target.startswith(_CUDNN):
        # The score tensor has all token pairs; cuDNN computes half of them if attention is causal.
        scores = re.search(
            r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^\]]*)\]', i.attributes
        )
        if scores is None:
            return None
        *batch, queries, keys = (int(n) for n in re.findall(r"\d+", scores.group(1)))
        n_pairs = prod(batch) * in_blocks(queries) * in_blocks(keys)
        visible_share = 0.5 if re.search(r'"mask_type":\s*"\w*CAUSAL', i.attributes) else 1.0
        return 2.0 * _attention_products(i) * visible_share * n_pairs * i.reads[0].shape[-1]
    if products := _attention_products(i):
        tokens = in_blocks(i.reads[0].shape[1])
        return 2.0 * products * _query_size(i) * visible_pairs * token_pairs(tokens) / tokens
    for name, n_products in _STATES_PRODUCTS.items():
        if name in i.attributes:
            return 2.0 * n_products * i.reads[0].size * i.arrays[0].shape[-2]
    return None


def _query_size(i: Instruction) -> int:
    is_library = i.custom_call_target.startswith(_LIBRARIES)
    return query_size(i.reads[0].shape, library=is_library)


def _attention_products(i: Instruction) -> int:
    """Return the number of matrix products in an attention kernel; 0: another instruction."""
    if i.custom_call_target.startswith(_CUDNN):
        is_backward = "Backward" in i.custom_call_target
        return ATTENTION_PRODUCTS[
            f"dot_product_attention_{'bwd' if is_backward else 'fwd'}_wrapper"
        ]
    return next((n for name, n in ATTENTION_PRODUCTS.items() if name in i.attributes), 0)


def _may_compute_products(i: Instruction) -> bool:
    """Return whether an instruction without known FLOPs could be a product."""
    target = i.custom_call_target
    is_call = i.opcode == "custom-call" and not _NO_PRODUCT.search(target)
    return i.opcode == "convolution" or is_call


def _product_dims(i: Instruction, kind: str) -> list[int]:
    """Return the "contracting" or "batch" dims of a product's left operand."""
    text = i.attributes
    numbers = re.search(rf'"lhs_{kind}_dimensions":\s*\[([^\]]*)\]', text)
    numbers = numbers or re.search(rf"lhs_{kind}_dims=\{{([^}}]*)\}}", text)
    return [int(n) for n in re.findall(r"\d+", numbers.group(1))] if numbers else []


def _product_kernel(i: Instruction) -> Kernel:
    """Return a matrix product's kernel; products with a batch dim count as attention."""
    lhs, rhs = i.reads[:2]
    output = i.arrays[0]
    batch = prod(lhs.shape[d] for d in _product_dims(i, "batch"))
    depth = prod(lhs.shape[d] for d in _product_dims(i, "contracting"))
    rows = lhs.size / max(batch * depth, 1)
    cols = output.size / max(batch * rows, 1)
    dtypes = {_DTYPES.get(a.dtype, "float32") for a in (lhs, rhs)}
    return Kernel(
        Kind.ATTENTION if batch > 1 else Kind.MATMUL,
        2.0 * output.size * depth,
        sum(a.n_bytes for a in i.reads) + output.n_bytes,  # cuBLAS may add to a third operand
        rows,
        cols,
        depth,
        dtypes.pop() if len(dtypes) == 1 else "float32",
    )


def _fusion_kernel(module: HloModule, body: Computation) -> Kernel:
    """Return a fusion's kernel: a copy, elementwise work, a lookup, or products."""
    n_bytes = _fused_bytes(body)
    products = [_product_kernel(dot) for dot in _fused_dots(module, body)]
    if products:
        return replace(products[0], flops=sum(p.flops for p in products), n_bytes=n_bytes)
    has_lookup = any(inner.opcode in ("gather", "scatter") for inner in body.values())
    # Ignore computed scalars, such as indices into a stack.
    only_moves = {inner.opcode for inner in body.values() if inner.arrays[0].size > 1} <= _COPY_OPS
    return Kernel(
        Kind.LOOKUP if has_lookup else Kind.COPY if only_moves else Kind.ELEMENTWISE, 0.0, n_bytes
    )


def _fused_dots(module: HloModule, body: Computation) -> list[Instruction]:
    """Return the products of a fusion and of nested fusions; a fusion around cuBLAS reads or writes
    a row of a stack in place."""
    dots = [i for i in body.values() if i.opcode == "dot" or i.custom_call_target in _CUBLAS]
    fusions = (i for i in body.values() if i.opcode == "fusion")
    return dots + [
        d for i in fusions for d in _fused_dots(module, module.computations[i.called[0]])
    ]


def _fused_bytes(body: Computation) -> float:
    """Return the bytes that a fusion reads and writes."""
    users: dict[Instruction, list[Instruction]] = {}
    for inner in body.values():
        for operand in inner.operands:
            users.setdefault(operand, []).append(inner)
    *_, root = body.values()
    read = sum(_used_bytes(i, users) for i in body.values() if i.opcode == "parameter")
    return read + sum(map(_result_bytes, root.operands if root.opcode == "tuple" else [root]))


def _used_bytes(source: Instruction, users: dict[Instruction, list[Instruction]]) -> float:
    """Return the bytes that a fusion reads from one operand."""
    used = 0.0
    for user in users.get(source, ()):
        is_first = user.operands[0] is source
        if user.opcode == "bitcast":
            used += _used_bytes(user, users)
        elif is_first and user.opcode in (*_SLICE_OPS, "gather"):
            used += user.arrays[0].n_bytes
        elif not (is_first and user.opcode in ("dynamic-update-slice", "scatter")):
            return source.n_bytes
    return min(source.n_bytes, used)


def _result_bytes(output: Instruction) -> float:
    """Return the bytes that a fusion writes for one result, or for the update if it is in place."""
    source = output
    while source.opcode in ("bitcast", "get-tuple-element") and source.operands:
        source = source.operands[0]
    if source.opcode == "dynamic-update-slice":
        return source.operands[1].arrays[0].n_bytes
    if source.opcode == "scatter":
        return 2 * source.operands[-1].arrays[0].n_bytes
    return sum(a.n_bytes for a in output.arrays if a.dtype not in _WORKSPACE)


_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")


def _replica_group(i: Instruction) -> tuple[int, int]:
    """Return (number of devices in a collective's group, difference of neighbours' numbers)."""
    if i.opcode.startswith("collective-permute"):
        return 2, 1
    text = i.attributes
    if match := _MESH.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match.group(1))}
        axes = re.findall(r"'(\w+)'", match.group(2))
        last = list(sizes).index(axes[-1])
        return prod(sizes[name] for name in axes), prod(list(sizes.values())[last + 1 :])
    if match := _IOTA.search(text):
        shape, tiles, order = (_numbers(match.group(n) or "") for n in (1, 2, 3))
        ids = np.arange(prod(tiles)).reshape(tiles)
        first = (ids.transpose(order) if order else ids).reshape(shape)[0].tolist()
    elif match := _LIST.search(text):
        first = _numbers(match.group(1))
    else:
        return 1, 1
    return len(first), max(1, first[1] - first[0]) if len(first) > 1 else 1


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _transfer_bytes(i: Instruction) -> float:
    """Return the bytes of the larger of a collective's input and output on one device."""
    read_bytes = sum(o.n_bytes for o in i.operands)
    written = i.n_bytes - (read_bytes if i.opcode in _RESULT_HAS_OPERANDS else 0.0)
    return max(read_bytes, written)
