"""Arrays that a compiled program keeps in memory and that grow with the square of a row's tokens:
what an attention without a kernel makes of its scores."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dflop_jax.gpu_compile.hlo_text import ArrayType, parse_hlo

# Instructions whose called computations have arrays of their own in memory; what a fusion computes
# inside has none.
_RUNS_OTHERS = frozenset({"while", "call", "conditional", "async-start"})


def kept_arrays(text: str) -> set[ArrayType]:
    """Arrays that instructions read and write, those in loops and branches included.

    Raises:
      ValueError: the text is not that of an HLO module.
    """
    module = parse_hlo(text)

    def of(name: str) -> Iterator[ArrayType]:
        for instruction in module.computations.get(name, {}).values():
            yield from instruction.arrays
            if instruction.opcode in _RUNS_OTHERS:
                for names in instruction.called.values():
                    for inner in names:
                        yield from of(inner)

    return set(of(module.entry))


def pair_arrays(text: str, tokens: int) -> tuple[str, ...]:
    """The arrays of `compiled.as_text()`, such as "f32[8,8192,8192]", that hold something of every
    pair of a row's tokens: two of their dims are multiples of them.

    Raises:
      ValueError: the text is not that of an HLO module.
    """
    found = [a for a in kept_arrays(text) if sum(n and n % tokens == 0 for n in a.shape) > 1]
    found.sort(key=lambda a: (-prod(a.shape), a.dtype))
    return tuple(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in found)
