"""Gathers of parameters over tensor ranks, which should keep their own parts of every matrix.

A compiler that is left to choose may make a parameter whole over the tensor ranks before its pieces
of data ranks are joined, or a gradient before it is summed in pieces; see `pipeline.shards`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from dflop_jax.gpu_compile.hlo_cost import bodies
from dflop_jax.gpu_compile.hlo_text import Computation, HloModule, Instruction, parse_hlo

# Operations whose result is what they read: elsewhere, cut, joined, or in another type.
_MOVES = frozenset(
    ("all-gather", "all-gather-done", "all-gather-start", "all-to-all", "bitcast", "broadcast",
     "concatenate", "constant", "convert", "copy", "copy-done", "copy-start", "dynamic-slice",
     "opt-barrier", "pad", "reshape", "select", "slice", "transpose")
)  # fmt: skip
# What a fusion of these has beside them: arguments, and places counted from the device's number.
_BESIDE = frozenset(
    ("add", "and", "clamp", "compare", "iota", "multiply", "parameter", "partition-id", "subtract",
     "tuple")
)  # fmt: skip
_FLOATS = re.compile(r"b?f\d")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[('\w+'=\d+(?:,'\w+'=\d+)*)\] \{('\w+'(?:,'\w+')*)\}")


def parameter_gathers(text: str, tensor: int) -> int:
    """All-gathers over tensor ranks of a program's parameters (all that it is given: weights, and
    what exchanges and other programs hand it), or of matrices that are then summed in pieces, which
    are gradients; as the text has them, however often they run.

    Args:
      text: what `compiled.as_text()` gives.
      tensor: tensor ranks, the last axis of the program's mesh.

    Raises:
      ValueError: the text is not that of an HLO module.
    """
    module = parse_hlo(text)
    if tensor == 1:
        return 0
    given, total = _given(module), 0
    for name, computation in module.computations.items():
        summed = set(_summed(module, computation))
        for i in computation.values():
            if _joins_tensor_ranks(i, tensor):
                of_parameter = all(_floats_of(computation, i.operands, given[name]))
                total += of_parameter or (i.name in summed and len(i.arrays[-1].shape) > 1)
    return total


def _joins_tensor_ranks(instruction: Instruction, tensor: int) -> bool:
    if instruction.opcode.removesuffix("-start") != "all-gather":
        return False
    groups = device_groups(instruction.attributes)
    return groups is None or any(
        a != b and a // tensor == b // tensor for group in groups for a in group for b in group
    )


def device_groups(attributes: str) -> list[list[int]] | None:
    """The groups of devices between which a collective runs; None for all devices, and for text of
    a form that is not known."""
    if listed := _LISTED.search(attributes):
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed.group(1))]
    if iota := _IOTA.search(attributes):
        shape, sizes, order = (_numbers(part or "") for part in iota.groups())
        devices = np.arange(np.prod(sizes)).reshape(sizes)
        return devices.transpose(order or range(len(sizes))).reshape(shape).tolist()
    if mesh := _MESH.search(attributes):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        joined = [list(axes).index(name) for name in re.findall(r"\w+", mesh.group(2))]
        devices = np.arange(np.prod(sizes := [int(n) for n in axes.values()])).reshape(sizes)
        groups = np.moveaxis(devices, joined, range(-len(joined), 0))
        return groups.reshape(-1, np.prod([sizes[i] for i in joined])).tolist()
    return None


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _summed(module: HloModule, computation: Computation) -> Iterator[str]:
    """What a sum in pieces (reduce-scatter) reads, moves looked through."""
    waiting = [
        operand
        for i in computation.values()
        if i.opcode.removesuffix("-start") == "reduce-scatter"
        for operand in i.operands
    ]
    while waiting:
        if i := computation.get(waiting.pop()):
            yield i.name
            gathers = i.opcode.startswith("all-gather")
            waiting += i.operands if _moves(module, i) and not gathers else ()


def _moves(module: HloModule, instruction: Instruction) -> bool:
    """Whether an instruction computes no float from floats."""
    if instruction.opcode != "fusion":
        return instruction.opcode in _MOVES
    return all(
        i.opcode in _MOVES or (i.opcode in _BESIDE and not (_computes(i.opcode) and _has_float(i)))
        for name in bodies(instruction)
        for i in module.computations.get(name, {}).values()
    )


def _computes(opcode: str) -> bool:
    return opcode in ("add", "multiply", "subtract", "clamp")


def _has_float(instruction: Instruction) -> bool:
    return any(_FLOATS.match(a.dtype) for a in instruction.arrays)


# ---- what a program was given ----

_Flags = list[bool]  # of an instruction, by array of its result


def _given(module: HloModule) -> Mapping[str, dict[str, _Flags]]:
    """By computation and instruction, which arrays are made of what the program was given by moves
    alone. All are taken to be, until they read one that is not."""
    callers: dict[str, list[tuple[str, Instruction]]] = {}
    for name, computation in module.computations.items():
        for i in computation.values():
            for body in bodies(i):
                callers.setdefault(body, []).append((name, i))
    given = {
        name: {i.name: [True] * len(i.arrays) for i in computation.values()}
        for name, computation in module.computations.items()
    }
    changed = True
    while changed:
        changed = False
        for name, computation in module.computations.items():
            for i in computation.values():
                flags = _flags(module, i, computation, given, given[name], callers.get(name, ()))
                changed |= flags != given[name][i.name]
                given[name][i.name] = flags
    return given


def _flags(
    module: HloModule,
    instruction: Instruction,
    computation: Computation,
    given: Mapping[str, dict[str, _Flags]],
    here: Mapping[str, _Flags],
    callers: Iterable[tuple[str, Instruction]],
) -> _Flags:
    """The flags of one instruction, from those of what it reads; `here` are its computation's,
    which `callers` run."""
    n = len(instruction.arrays)
    read = [flag for name in instruction.operands for flag in here.get(name, ())]
    match instruction.opcode:
        case "parameter":
            handed = [_handed(call, instruction, given[name]) for name, call in callers]
            return [all(flags) for flags in zip(*handed)] if handed else [True] * n
        case "tuple" | "opt-barrier":
            return read
        case "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.attributes)
            is_flat = n == 1 and index is not None and int(index.group(1)) < len(read)
            return [read[int(index.group(1))]] if index and is_flat else [all(read)] * n
        case "while":
            ends = [_root(module, body, given) for body in instruction.called.get("body", ())]
            return [all(flags) for flags in zip(read, *ends)]
        case "call":
            (body,) = bodies(instruction)
            return _root(module, body, given)
    moves = _moves(module, instruction)
    return [moves and all(_floats_of(computation, instruction.operands, here))] * n


def _handed(call: Instruction, parameter: Instruction, there: Mapping[str, _Flags]) -> _Flags:
    """The flags of what a call hands to a computation's parameter."""
    if call.opcode == "while":  # which has them for every round
        return there[call.name]
    number, nothing = int(parameter.argument), [False] * len(parameter.arrays)
    if number >= len(call.operands):
        return nothing
    return there.get(call.operands[number], nothing)


def _root(module: HloModule, body: str, given: Mapping[str, dict[str, _Flags]]) -> _Flags:
    root = next(i for i in module.computations[body].values() if i.is_root)
    return given[body][root.name]


def _floats_of(
    computation: Computation, names: Iterable[str], flags: Mapping[str, _Flags]
) -> Iterator[bool]:
    """The flags of those arrays that hold floats."""
    for i in (computation[name] for name in names if name in computation):
        yield from (f for f, a in zip(flags[i.name], i.arrays) if _FLOATS.match(a.dtype))
