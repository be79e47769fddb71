"""Kernels of a traced function (matrix products, attention, lookups and fused elementwise work),
and their time from the roofline model.

Connected elementwise operations between two products become one kernel that reads and writes each
array once, as XLA fuses them. Products of two activations (with a batch dim) and attention kernels
without a jaxpr count as attention; a trace gives their bytes, the module the FLOPs of kernels
(`attention_flops`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from dflop_jax.profile.collectives import all_gather_s, all_reduce_s, send_s
from dflop_jax.profile.sharded_trace import LAYOUT_OPS, RESHARD, Op, Region, Value
from dflop_jax.records import Hardware

Kind = IntEnum(
    "Kind", "MATMUL ATTENTION ATTENTION_BACKWARD ELEMENTWISE LOOKUP REDUCE GATHER SEND COPY"
)
_SCATTERS = ("scatter", "scatter-add", "scatter_add")
_LOOKUPS = ("gather", *_SCATTERS)
# cuDNN's, as jax names them in traces. Compiled programs drop "_wrapper".
_CUDNN_CALLS = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
_MOSAIC_CALL = "custom_vmap_call"  # the same of tokamax's forward
_ATTENTION_CALLS = ("pallas_call", *_CUDNN_CALLS, _MOSAIC_CALL)
# Number of matrix products in attention kernels (queries x keys, weights x values, gradients), by
# name. Those of `models` start with "packed_".
ATTENTION_PRODUCTS = {
    "packed_attention_forward": 2,
    "packed_attention_kv_gradient": 4,
    "packed_attention_q_gradient": 3,
    _CUDNN_CALLS[0]: 2,
    _CUDNN_CALLS[1]: 5,
}
# What attention kernels compute at a time: tokens and, in those of `models`, elements of a head.
_BLOCK_TOKENS, _HEAD_MULTIPLE = 128, 16
_KERNEL_OPS = ("dot_general", "conv_general_dilated", *_LOOKUPS, *_ATTENTION_CALLS)


@dataclass(frozen=True)
class Kernel:
    """FLOPs and bytes per launch of a kernel on one device. Bytes of a reduction are each device's
    input; of a gather or scatter, the whole array. A COPY moves arrays without computing; only
    compiled programs have copies."""

    kind: Kind
    flops: float
    n_bytes: float
    rows: float = 0.0  # of a product on this device; 0: the kernel's rate does not depend on size
    cols: float = 0.0
    depth: float = 0.0
    dtype: str = "float32"
    repeats: int = 1  # launches
    pair_flops: float = 0.0  # attention FLOPs if each token has one pair
    library: bool = False  # attention of a library
    group: int = 0  # devices in a collective, `stride` apart; 0: the tensor-parallel group
    stride: int = 1


def kernels_of(region: Region, repeats: int = 1) -> list[Kernel]:
    """Return the kernels that a region launches, each `repeats` times."""
    kernels: list[Kernel] = []
    for op in region.ops:
        if op.body is not None:
            kernels += kernels_of(op.body, repeats * op.repeats)
        elif op.name == "dot_general":
            kernels.append(_product_kernel(op, repeats))
        elif op.name == "conv_general_dilated":
            kernels.append(_convolution_kernel(op, repeats))
        elif op.name in _ATTENTION_CALLS:
            kernels.append(_attention_kernel(op, repeats))
        elif op.name in _LOOKUPS:
            lookup_values = op.outputs[0] if op.name == "gather" else op.inputs[-1]
            kernels.append(Kernel(Kind.LOOKUP, 0.0, 2 * lookup_values.n_bytes, repeats=repeats))
    for v in region.reduced:  # a sharded result is scattered, which costs as much as a gather
        whole_bytes = v.n_bytes * (1 if v.dim is None else v.tp)
        kind = Kind.REDUCE if v.dim is None else Kind.GATHER
        kernels.append(Kernel(kind, 0.0, whole_bytes, repeats=repeats))
    kernels += [Kernel(Kind.GATHER, 0.0, v.n_bytes, repeats=repeats) for v in region.gathered]
    fused = (sum(v.n_bytes for v in f.read | f.written) for f in fusions(region))
    return kernels + [Kernel(Kind.ELEMENTWISE, 0.0, n, repeats=repeats) for n in fused if n > 0]


def _product_kernel(op: Op, repeats: int) -> Kernel:
    lhs, rhs = op.inputs
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    batch = prod(lhs.shape[i] for i in lb)
    depth = prod(lhs.shape[i] for i in lc)
    rows = prod(lhs.shape) / max(batch * depth, 1)
    cols = prod(rhs.shape) / max(batch * depth, 1)
    split = float(lhs.tp)
    if lhs.dim in lc or rhs.dim in rc:
        depth /= split
    elif lhs.dim in lb or rhs.dim in rb:
        batch /= split
    elif lhs.dim is not None:
        rows /= split
    elif rhs.dim is not None:
        cols /= split
    flops = 2.0 * batch * rows * cols * depth
    n_bytes = lhs.n_bytes + rhs.n_bytes + op.outputs[0].n_bytes
    kind = Kind.ATTENTION if len(lb) else Kind.MATMUL
    dtype = str(max(lhs.dtype, rhs.dtype, key=lambda d: d.itemsize))
    return Kernel(kind, flops, n_bytes, rows, cols, depth, dtype, repeats)


def in_blocks(size: int, block: int = _BLOCK_TOKENS) -> int:
    """Return how many tokens, or elements of a head, an attention kernel computes for `size`."""
    return -(-size // block) * block


def query_size(shape: Sequence[int], *, library: bool) -> int:
    """Return how many elements of queries [rows, tokens, heads, head_dim] a kernel computes."""
    rows, tokens, heads, head_dim = shape
    return rows * in_blocks(tokens) * heads * in_blocks(head_dim, 1 if library else _HEAD_MULTIPLE)


def _attention_kernel(op: Op, repeats: int) -> Kernel:
    n_bytes = sum(v.n_bytes for v in (*op.inputs, *op.outputs))
    name = "packed_attention_forward" if op.name == _MOSAIC_CALL else op.name
    products = ATTENTION_PRODUCTS.get(op.params.get("name", name), 0)
    queries, library = op.inputs[0], op.name in (*_CUDNN_CALLS, _MOSAIC_CALL)
    tp = 1 if queries.dim is None else queries.tp
    n_queries = query_size(queries.shape, library=library) / tp if products else 0.0
    return Kernel(
        Kind.ATTENTION_BACKWARD if products > 2 else Kind.ATTENTION,
        flops=0.0,
        n_bytes=n_bytes,
        dtype=str(op.outputs[0].dtype),
        repeats=repeats,
        pair_flops=2.0 * products * n_queries,
        library=library,
    )


def _convolution_kernel(op: Op, repeats: int) -> Kernel:
    x, kernel = op.inputs
    output = op.outputs[0]
    numbers = op.params["dimension_numbers"]
    cols = kernel.shape[numbers.rhs_spec[0]]
    depth = prod(kernel.shape) / cols
    rows = prod(output.shape) / cols
    n_bytes = x.n_bytes + kernel.n_bytes + output.n_bytes
    flops = 2.0 * rows * cols * depth
    return Kernel(Kind.MATMUL, flops, n_bytes, rows, cols, depth, str(x.dtype), repeats)


@dataclass(frozen=True)
class Fusion:
    """Elementwise operations that run as one kernel, and the values the kernel reads and writes."""

    ops: list[Op]
    read: set[Value]
    written: set[Value]


def is_kernel(op: Op) -> bool:
    """Return whether an operation is a separate kernel (or a loop of kernels)."""
    return op.name in _KERNEL_OPS or op.body is not None or is_resharded(op)


def is_resharded(op: Op) -> bool:
    """Return whether an operation changes an array's sharding (a gather, or scatter of a sum)."""
    return op.name == RESHARD and op.inputs[0].dim != op.outputs[0].dim


def fusions(region: Region) -> list[Fusion]:
    """Return each set of connected elementwise operations with the same number of products before
    them. Sets that only change layouts are left out: a product can read the original array."""
    level_after: dict[Value, int] = {}
    level_of: dict[Op, int] = {}
    parent: dict[Op, Op] = {}
    producer: dict[Value, Op] = {}
    readers: dict[Value, list[Op]] = {}
    reduced, region_outputs = set(region.reduced), set(region.outputs)

    def root(op: Op) -> Op:
        while parent[op] is not op:
            parent[op] = op = parent[parent[op]]
        return op

    for op in region.ops:
        level_of[op] = max((level_after.get(v, 0) for v in op.inputs), default=0)
        level_after |= {v: level_of[op] + (is_kernel(op) or v in reduced) for v in op.outputs}
        for v in op.inputs:
            readers.setdefault(v, []).append(op)
        if is_kernel(op):
            continue
        parent[op] = op
        producer |= dict.fromkeys(op.outputs, op)
        for v in op.inputs:
            if v in producer and level_of[producer[v]] == level_of[op] and v not in reduced:
                parent[root(producer[v])] = root(op)
    groups: dict[Op, list[Op]] = {}
    for op in parent:
        groups.setdefault(root(op), []).append(op)
    fused = []
    for group in groups.values():
        if all(op.name in LAYOUT_OPS for op in group):
            continue
        members, outputs = set(group), {v for op in group for v in op.outputs}
        read = {v for op in group for v in op.inputs if v not in outputs}
        left = {v for v in outputs if any(r not in members for r in readers.get(v, []))}
        fused.append(Fusion(group, read, left | (outputs & region_outputs)))
    return fused


def peak_temporary_bytes(region: Region, value_bytes: Callable[[Value], float]) -> float:
    """Return the peak bytes of the values that a region computes, without inputs and outputs.

    Elementwise work reuses the buffer of an input of the same size that is not read later; a
    scatter updates an array of the region in place. `value_bytes`: a value's bytes on one device.
    """
    fused = fusions(region)
    position = {op: i for i, op in enumerate(region.ops)}
    end_of = {op: max(position[o] for o in f.ops) for f in fused for op in f.ops}
    buffer_of: dict[Value, Value] = {}  # value -> the value whose buffer it shares
    first_op: dict[Value, int] = {v: end_of[f.ops[0]] for f in fused for v in f.written}
    last_op: dict[Value, int] = {}
    for i, op in enumerate(region.ops):
        writes_in_place = op.name in _SCATTERS and op.inputs[0] not in region.inputs
        if (op.name in LAYOUT_OPS and not is_resharded(op)) or writes_in_place:
            buffer_of |= dict.fromkeys(op.outputs, buffer_of.get(op.inputs[0], op.inputs[0]))
        elif is_kernel(op):  # a loop's carries keep their buffers
            first_op |= dict.fromkeys(op.outputs[len(op.carry) :], i)
        for v in op.inputs:
            v = buffer_of.get(v, v)
            last_op[v] = max(last_op.get(v, 0), end_of.get(op, i))
    output_buffers = {buffer_of.get(v, v) for v in region.outputs}
    temporaries = [
        v for v in first_op if v in last_op and v not in output_buffers and v not in buffer_of
    ]
    allocations: dict[int, list[float]] = {}
    frees: dict[int, list[float]] = {}
    for v in temporaries:
        allocations.setdefault(first_op[v], []).append(value_bytes(v))
        frees.setdefault(last_op[v], []).append(value_bytes(v))
    live_bytes = peak = 0.0
    for i, op in enumerate(region.ops):
        allocated, freed = allocations.get(i, []), frees.get(i, [])
        live_bytes += sum(allocated)
        in_both = Counter[float]() if is_kernel(op) else Counter(allocated) & Counter(freed)
        reused = sum(n * count for n, count in in_both.items())
        body_bytes = peak_temporary_bytes(op.body, value_bytes) if op.body else 0.0
        peak = max(peak, live_bytes - reused + body_bytes)
        live_bytes -= sum(freed)
    return peak


# ---- seconds ----


@dataclass(frozen=True)
class Efficiency:
    """Efficiency of kernels relative to the hardware's peak.

    Defaults are assumptions for GPUs: with them an n x n x n bfloat16 product reaches 48%, 63% and
    68% of an A100's peak at n = 1024, 2048 and 4096. Attention is fitted to the H100 timings in
    docs/gpus.md, with errors up to 27%: of `models`' kernels, and of cuDNN for libraries.
    """

    matmul: float = 0.72  # share of peak FLOP/s for a large matrix product
    attention: float = 0.26  # the same for products of attention, batched over heads
    attention_back: float = 0.42  # the same for all products of attention's gradient kernels
    attention_pairs: float = 700.0  # fixed cost of attention per token, in token pairs
    library_attention: float = 0.7  # the same three for libraries, with pairs of either direction
    library_attention_back: float = 0.58
    library_pairs: float = 2600.0
    library_back_pairs: float = 800.0
    half_dim: float = 64.0  # rows, columns or depth at which a product's rate halves, each
    bandwidth: float = 0.85  # share of memory bandwidth for elementwise work and products
    lookup: float = 0.3  # the same for gathers and scatters by row
    launch_s: float = 3e-6  # overhead per kernel: launch, first loads, last stores
    task_s: float = 20e-6  # overhead per program call


def program_s(
    kernels: Iterable[Kernel], tp: int, hardware: Hardware, efficiency: Efficiency = Efficiency()
) -> float:
    """Return the seconds of a program's kernels, run in sequence, on one of `tp` tensor ranks."""
    seconds = 0.0
    for kernel in kernels:
        seconds += kernel.repeats * _kernel_s(kernel, tp, hardware, efficiency)
    return seconds


def _kernel_s(kernel: Kernel, tp: int, hardware: Hardware, efficiency: Efficiency) -> float:
    """Return the seconds of one launch of a kernel."""
    if kernel.kind == Kind.SEND:
        return float(send_s(kernel.n_bytes, hardware))
    if kernel.kind in (Kind.REDUCE, Kind.GATHER):
        collective_s = all_reduce_s if kernel.kind == Kind.REDUCE else all_gather_s
        group_size = kernel.group or tp
        return float(collective_s(kernel.n_bytes, group_size, hardware, stride=kernel.stride))
    e = efficiency
    peak_share, fixed_pairs = {
        (Kind.ATTENTION, False): (e.attention, e.attention_pairs),
        (Kind.ATTENTION_BACKWARD, False): (e.attention_back, e.attention_pairs),
        (Kind.ATTENTION, True): (e.library_attention, e.library_pairs),
        (Kind.ATTENTION_BACKWARD, True): (e.library_attention_back, e.library_back_pairs),
    }.get((kernel.kind, kernel.library), (e.matmul, 0.0))
    size_factor = prod(
        d / (d + efficiency.half_dim) for d in (kernel.rows, kernel.cols, kernel.depth) if d > 0
    )
    flops = kernel.flops + fixed_pairs * kernel.pair_flops
    compute_s = flops / (hardware.peak_flops(kernel.dtype) * peak_share * size_factor)
    bandwidth_share = efficiency.lookup if kernel.kind == Kind.LOOKUP else efficiency.bandwidth
    bytes_per_s = bandwidth_share * hardware.memory_bandwidth
    return max(compute_s, kernel.n_bytes / bytes_per_s) + efficiency.launch_s
