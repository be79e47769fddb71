"""Parser for the text of optimized HLO modules, which walks executed instructions and finds arrays
that grow with the square of a row's tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

# Bits per element of types whose name does not end in the number of bits.
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]|\b(token|opaque)\[\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|branch_computations|true_computation|false_computation|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
# Attributes that name the computations an instruction runs, by opcode. Computations applied to
# single elements (reduce, sort) and loop conditions are left out, since they contain no product.
# Computations of KERNEL_CALLS launch kernels and have arrays in memory; those inside a fusion do
# not.
KERNEL_CALLS = {
    "while": ("body",),
    "call": ("to_apply", "calls"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "async-start": ("calls",),
}
_ALL_CALLS = {**KERNEL_CALLS, "fusion": ("calls",), "fusion-start": ("calls",)}


@dataclass(frozen=True)
class ArrayType:
    """Type of an array: element type, such as "bf16", and shape."""

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


@dataclass(frozen=True, eq=False)
class Instruction:
    """One HLO instruction."""

    name: str
    opcode: str
    arrays: tuple[ArrayType, ...]  # of the result; tuples are flattened
    operand_names: tuple[str, ...]  # instructions of the same computation
    attributes: str  # the text after the operands
    computation: Computation = field(repr=False)

    @cached_property
    def operands(self) -> list[Instruction]:
        return [self.computation[n] for n in self.operand_names if n in self.computation]

    @property
    def reads(self) -> list[ArrayType]:
        """First array of each operand."""
        return [o.arrays[0] for o in self.operands if o.arrays]

    @property
    def n_bytes(self) -> float:
        return sum(a.n_bytes for a in self.arrays)

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs (`_ALL_CALLS`)."""
        named = dict(_CALLED.findall(self.attributes.split(", metadata={", 1)[0]))
        texts = (named.get(role, "") for role in _ALL_CALLS.get(self.opcode, ()))
        return [name for text in texts for name in re.findall(r"[\w.\-]+", text)]

    @property
    def trip_count(self) -> int | None:
        """Number of runs of the called computations, 1 except for loops; None: unknown."""
        if self.opcode != "while":
            return 1
        n = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', self.attributes)
        return int(n.group(1)) if n else None

    @property
    def custom_call_target(self) -> str:
        target = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return target.group(1) if target else ""


Computation = Mapping[str, Instruction]  # by name, in the order of the text


@dataclass(frozen=True)
class HloModule:
    """Parsed HLO module: computations by name, and the name of the entry computation."""

    computations: Mapping[str, Computation]
    entry: str

    def walk(self, name: str = "", n_runs: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yield (instruction, number of runs) in order, including called computations
        (`KERNEL_CALLS`). Loops of unknown length count one iteration, conditionals their longest
        branch."""
        for i in self.computations.get(name or self.entry, {}).values():
            yield i, n_runs
            if i.opcode in KERNEL_CALLS:
                called = i.called
                if i.opcode == "conditional":
                    called = sorted(called, key=lambda c: -len(self.computations[c]))[:1]
                for computation in called:
                    yield from self.walk(computation, n_runs * (i.trip_count or 1))


def parse_hlo(text: str) -> HloModule:
    """Parse the text of `compiled.as_text()`; ValueError: it has no ENTRY computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif instruction := _parse_instruction(line, current):
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("the text has no ENTRY computation; give the text of an HLO module")
    return HloModule(computations, entry)


def _parse_instruction(line: str, computation: Computation) -> Instruction | None:
    """Return the instruction in a line of a computation; None for other lines."""
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    text = line[head.end() :]
    stop = _closing_parenthesis(text, 0) + 1 if text.startswith("(") else text.find(" ")
    open_at = text.find("(", stop)
    if stop <= 0 or open_at < 0:
        return None
    close_at = _closing_parenthesis(text, open_at)
    argument = text[open_at + 1 : close_at]
    opcode = text[stop:open_at].strip()
    return Instruction(
        name=head.group(2),
        opcode=opcode,
        arrays=_parse_arrays(text[:stop]),
        # The operand text of a constant is its value.
        operand_names=() if opcode == "constant" else tuple(_NAME.findall(argument)),
        attributes=text[close_at + 1 :],
        computation=computation,
    )


def _closing_parenthesis(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`, or `len(text)`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _parse_arrays(text: str) -> tuple[ArrayType, ...]:
    """Parse the arrays of a type, without layouts; a dynamic size counts as its bound."""
    arrays = []
    for match in _ARRAY.finditer(text):
        dtype = match.group(1) or match.group(3)
        sizes = (match.group(2) or "").replace("<=", "")
        arrays.append(ArrayType(dtype, tuple(int(n) for n in sizes.split(",") if n)))
    return tuple(arrays)


def pair_arrays(module: HloModule, tokens: int) -> tuple[str, ...]:
    """Return types such as "f32[8,8192,8192]" of arrays with a value for every pair of a row's
    tokens (two dims are multiples of `tokens`), as attention without a fused kernel creates."""
    arrays = dict.fromkeys(a for i, _ in module.walk() for a in i.arrays)
    pair_sized = [a for a in arrays if sum(n and n % tokens == 0 for n in a.shape) > 1]
    pair_sized.sort(key=lambda a: (-a.size, a.dtype))
    return tuple(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in pair_sized)
