"""Reads the text of an optimized HLO module into computations of instructions, and finds arrays in
it that grow with the square of a row's tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

# Bits of an element, where the type's name does not end in them.
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]|\b(token|opaque)\[\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|branch_computations|true_computation|false_computation|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
# Instructions whose called computations have arrays of their own in memory and launch kernels; what
# a fusion computes inside has none.
RUNS_OTHERS = frozenset({"while", "call", "conditional", "async-start"})


@dataclass(frozen=True)
class ArrayType:
    """Element type, such as "bf16", and sizes of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> float:
        if self.dtype in _BITS:
            return self.size * _BITS[self.dtype] / 8
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return self.size * int(bits.group(1)) / 8 if bits else 0.0


@dataclass(frozen=True)
class Instruction:
    """One operation.

    Attributes:
      arrays: of its result, those of a tuple side by side.
      operands: names of the instructions that it reads.
      attributes: the text behind its parentheses.
    """

    name: str
    opcode: str
    arrays: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    attributes: str

    @cached_property
    def called(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the computations that it runs, by the attribute that names them."""
        named = _CALLED.findall(self.attributes.split(", metadata={", 1)[0])
        return {role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in named}

    @property
    def custom_call_target(self) -> str:
        target = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return target.group(1) if target else ""


Computation = Mapping[str, Instruction]  # by name, in the order of the text


@dataclass(frozen=True)
class HloModule:
    """Computations by name, and the name of the one that runs first."""

    computations: Mapping[str, Computation]
    entry: str


def parse_hlo(text: str) -> HloModule:
    """Read what `compiled.as_text()` gives.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("the text holds no ENTRY computation; give that of an HLO module")
    return HloModule(computations, entry)


def _instruction(line: str) -> Instruction | None:
    """The instruction of a line; None for other lines."""
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    stop = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    open_at = rest.find("(", stop)
    if stop <= 0 or open_at < 0:
        return None
    close_at = _closing(rest, open_at)
    argument = rest[open_at + 1 : close_at]
    opcode = rest[stop:open_at].strip()
    return Instruction(
        name=head.group(2),
        opcode=opcode,
        arrays=_arrays(rest[:stop]),
        # A constant's text is its value.
        operands=() if opcode == "constant" else tuple(_NAME.findall(argument)),
        attributes=rest[close_at + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at `start`; the end if none does."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _arrays(text: str) -> tuple[ArrayType, ...]:
    """Arrays of a type's text, layouts left out; a dynamic size counts as its bound."""
    arrays = []
    for match in _ARRAY.finditer(text):
        dtype = match.group(1) or match.group(3)
        sizes = (match.group(2) or "").replace("<=", "")
        arrays.append(ArrayType(dtype, tuple(int(n) for n in sizes.split(",") if n)))
    return tuple(arrays)


def kept_arrays(text: str) -> set[ArrayType]:
    """Arrays that instructions read and write, those in loops and branches included.

    Raises:
      ValueError: the text is not that of an HLO module.
    """
    module = parse_hlo(text)

    def of(name: str) -> Iterator[ArrayType]:
        for instruction in module.computations.get(name, {}).values():
            yield from instruction.arrays
            if instruction.opcode in RUNS_OTHERS:
                for names in instruction.called.values():
                    for inner in names:
                        yield from of(inner)

    return set(of(module.entry))


def pair_arrays(text: str, tokens: int) -> tuple[str, ...]:
    """The arrays of `compiled.as_text()`, such as "f32[8,8192,8192]", that hold something of every
    pair of a row's tokens: two of their dims are multiples of these. An attention without a kernel
    makes such arrays of its scores.

    Raises:
      ValueError: the text is not that of an HLO module.
    """

    found = [a for a in kept_arrays(text) if sum(n and n % tokens == 0 for n in a.shape) > 1]
    found.sort(key=lambda a: (-prod(a.shape), a.dtype))
    return tuple(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in found)
