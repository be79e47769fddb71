"""Kernels of a traced function: matrix products, attention, lookups and fused elementwise work.

Operations between two products that hang together become one kernel that reads and writes each
array once, as XLA fuses them. Products of two activations (those with a batch dim) are "attention",
and so are kernels that a trace does not show the inside of: of these the bytes are known here, the
FLOPs are said by the module (`attention_flops`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from dflop_jax.profile.sharded_trace import LAID_OUT, LAYOUT, Op, Region, Value

MATMUL, ATTENTION, ATTENTION_BACK, ELEMENTWISE, LOOKUP, REDUCE, GATHER, SEND, COPY = range(9)
_SCATTERS = ("scatter", "scatter-add", "scatter_add")
_LOOKUPS = ("gather", *_SCATTERS)
_OPAQUE = ("pallas_call", "dot_product_attention_fwd", "dot_product_attention_bwd")
# Products of attention kernels, of `models`' own by the names that they give themselves: of queries
# with keys, of weights with values, and their gradients.
ATTENTION_PRODUCTS = {
    "packed_attention_forward": 2,
    "packed_attention_kv_gradient": 4,
    "packed_attention_q_gradient": 3,
    "dot_product_attention_fwd": 2,
    "dot_product_attention_bwd": 5,
}
_ANCHORS = ("dot_general", "conv_general_dilated", *_LOOKUPS, *_OPAQUE)


@dataclass(frozen=True)
class Kernel:
    """`repeats` launches on one device: FLOPs and bytes of each.

    `rows`, `cols` and `depth` are those of a product on this device, 0 of what reaches its rate at
    any size. `pair_flops` are an attention kernel's FLOPs for one pair of each of its tokens, by
    which `Efficiency` prices what its pieces cost beside their pairs. Collectives join `group`
    devices `stride` apart, 0: the tensor-parallel group. The bytes of `REDUCE` are those that each
    device adds up, those of `GATHER` (which stands for its inverse, too) what all devices have
    together. `COPY` moves arrays and computes nothing; traces, which know no layouts, have none.
    """

    kind: int
    flops: float
    n_bytes: float
    rows: float = 0.0
    cols: float = 0.0
    depth: float = 0.0
    dtype: str = "float32"
    repeats: int = 1
    pair_flops: float = 0.0
    group: int = 0
    stride: int = 1


def kernels_of(region: Region, repeats: int = 1) -> list[Kernel]:
    """Kernels that a region launches, each `repeats` times."""
    kernels: list[Kernel] = []
    for op in region.ops:
        if op.body is not None:
            kernels += kernels_of(op.body, repeats * op.repeats)
        elif op.name == "dot_general":
            kernels.append(_product(op, repeats))
        elif op.name == "conv_general_dilated":
            kernels.append(_convolution(op, repeats))
        elif op.name in _OPAQUE:
            kernels.append(_opaque(op, repeats))
        elif op.name in _LOOKUPS:
            moved = op.outs[0] if op.name == "gather" else op.ins[-1]
            kernels.append(Kernel(LOOKUP, 0.0, 2 * moved.n_bytes, repeats=repeats))
    for v in region.reduced:  # scattered: as a gather, of what each has of the sum's terms
        whole_bytes = v.n_bytes * (1 if v.dim is None else v.ways)
        kind = REDUCE if v.dim is None else GATHER
        kernels.append(Kernel(kind, 0.0, whole_bytes, repeats=repeats))
    kernels += [Kernel(GATHER, 0.0, v.n_bytes, repeats=repeats) for v in region.gathered]
    fused = (sum(v.n_bytes for v in f.read | f.written) for f in fusions(region))
    return kernels + [Kernel(ELEMENTWISE, 0.0, n, repeats=repeats) for n in fused if n > 0]


def _product(op: Op, repeats: int) -> Kernel:
    lhs, rhs = op.ins
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    batch = prod(lhs.shape[i] for i in lb)
    depth = prod(lhs.shape[i] for i in lc)
    rows = prod(lhs.shape) / max(batch * depth, 1)
    cols = prod(rhs.shape) / max(batch * depth, 1)
    split = float(lhs.ways)
    if lhs.dim in lc or rhs.dim in rc:
        depth /= split
    elif lhs.dim in lb or rhs.dim in rb:
        batch /= split
    elif lhs.dim is not None:
        rows /= split
    elif rhs.dim is not None:
        cols /= split
    flops = 2.0 * batch * rows * cols * depth
    n_bytes = lhs.n_bytes + rhs.n_bytes + op.outs[0].n_bytes
    kind = ATTENTION if len(lb) else MATMUL
    dtype = str(max(lhs.dtype, rhs.dtype, key=lambda d: d.itemsize))  # both are computed in it
    return Kernel(kind, flops, n_bytes, rows, cols, depth, dtype, repeats)


def _opaque(op: Op, repeats: int) -> Kernel:
    n_bytes = sum(v.n_bytes for v in (*op.ins, *op.outs))
    products = ATTENTION_PRODUCTS.get(op.params.get("name", op.name), 0)
    queries = op.ins[0]
    return Kernel(
        ATTENTION_BACK if products > 2 else ATTENTION,
        flops=0.0,
        n_bytes=n_bytes,
        dtype=str(op.outs[0].dtype),
        repeats=repeats,
        pair_flops=2.0 * products * queries.n_bytes / queries.dtype.itemsize,
    )


def _convolution(op: Op, repeats: int) -> Kernel:
    x, kernel = op.ins
    out = op.outs[0]
    numbers = op.params["dimension_numbers"]
    cols = kernel.shape[numbers.rhs_spec[0]]
    depth = prod(kernel.shape) / cols
    rows = prod(out.shape) / cols
    n_bytes = x.n_bytes + kernel.n_bytes + out.n_bytes
    flops = 2.0 * rows * cols * depth
    return Kernel(MATMUL, flops, n_bytes, rows, cols, depth, str(x.dtype), repeats)


@dataclass(frozen=True)
class Fusion:
    """Elementwise operations that run as one kernel, what it reads and what it writes."""

    ops: list[Op]
    read: set[Value]
    written: set[Value]


def is_anchor(op: Op) -> bool:
    """Whether an operation is a kernel of its own (or a loop of them)."""
    return op.name in _ANCHORS or op.body is not None or is_moved(op)


def is_moved(op: Op) -> bool:
    """Whether an operation lays an array out another way: gathers it, or scatters a sum."""
    return op.name == LAID_OUT and op.ins[0].dim != op.outs[0].dim


def fusions(region: Region) -> list[Fusion]:
    """Connected elementwise operations of one level (products passed on the way), each as one;
    without those that compute nothing, of which a product can read the original."""
    level_after: dict[Value, int] = {}
    level_of: dict[Op, int] = {}
    parent: dict[Op, Op] = {}
    maker: dict[Value, Op] = {}
    readers: dict[Value, list[Op]] = {}
    reduced, leaves = set(region.reduced), set(region.outs)

    def root(op: Op) -> Op:
        while parent[op] is not op:
            parent[op] = op = parent[parent[op]]
        return op

    for op in region.ops:
        level_of[op] = max((level_after.get(v, 0) for v in op.ins), default=0)
        level_after |= {v: level_of[op] + (is_anchor(op) or v in reduced) for v in op.outs}
        for v in op.ins:
            readers.setdefault(v, []).append(op)
        if is_anchor(op):
            continue
        parent[op] = op
        maker |= dict.fromkeys(op.outs, op)
        for v in op.ins:
            if v in maker and level_of[maker[v]] == level_of[op] and v not in reduced:
                parent[root(maker[v])] = root(op)
    groups: dict[Op, list[Op]] = {}
    for op in parent:
        groups.setdefault(root(op), []).append(op)
    fused = []
    for group in groups.values():
        if all(op.name in LAYOUT for op in group):
            continue
        inside, made = set(group), {v for op in group for v in op.outs}
        read = {v for op in group for v in op.ins if v not in made}
        written = {
            v for v in made if v in leaves or any(r not in inside for r in readers.get(v, []))
        }
        fused.append(Fusion(group, read, written))
    return fused


def working_bytes(region: Region, size: Callable[[Value], float]) -> float:
    """Most bytes alive at once of what a region makes, without what enters and leaves it.

    Elementwise work writes over an input of the same size that nothing reads later, and a scatter
    into what the region made.

    Args:
      size: bytes of a value on one device.
    """
    fused = fusions(region)
    position = {op: i for i, op in enumerate(region.ops)}
    end_of = {op: max(position[o] for o in f.ops) for f in fused for op in f.ops}
    held: dict[Value, Value] = {}  # value -> the one whose buffer it is
    born: dict[Value, int] = {v: end_of[f.ops[0]] for f in fused for v in f.written}
    dies: dict[Value, int] = {}
    for i, op in enumerate(region.ops):
        into_own = op.name in _SCATTERS and op.ins[0] not in region.ins
        if (op.name in LAYOUT and not is_moved(op)) or into_own:
            held |= dict.fromkeys(op.outs, held.get(op.ins[0], op.ins[0]))
        elif is_anchor(op):  # a loop's carries stay where they began
            born |= dict.fromkeys(op.outs[len(op.carry) :], i)
        for v in op.ins:
            v = held.get(v, v)
            dies[v] = max(dies.get(v, 0), end_of.get(op, i))
    leave = {held.get(v, v) for v in region.outs}
    made = [v for v in born if v in dies and v not in leave and v not in held]
    begin: dict[int, list[float]] = {}
    end: dict[int, list[float]] = {}
    for v in made:
        begin.setdefault(born[v], []).append(size(v))
        end.setdefault(dies[v], []).append(size(v))
    now = peak = 0.0
    for i, op in enumerate(region.ops):
        added, freed = begin.get(i, []), end.get(i, [])
        now += sum(added)
        reused = 0.0 if is_anchor(op) else _matched(added, freed)
        inner = working_bytes(op.body, size) if op.body else 0.0
        peak = max(peak, now - reused + inner)
        now -= sum(freed)
    return peak


def _matched(added: Sequence[float], freed: Sequence[float]) -> float:
    """Sum of the sizes that stand in both lists."""
    both = Counter(added) & Counter(freed)
    return sum(n * times for n, times in both.items())
