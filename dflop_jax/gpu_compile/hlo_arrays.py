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


def pair_arrays(text: str, tokens: int, heads: int = 0) -> tuple[str, ...]:
    """The arrays of `compiled.as_text()`, such as "f32[8,8192,8192]", that hold something of every
    pair of a row's tokens.

    Two of their dims are multiples of the row's tokens; or, with `heads`, one is and they have two
    bytes or more for each pair and head, in blocks of whatever shape.

    Raises:
      ValueError: the text is not that of an HLO module.
    """
    found = []
    for array in kept_arrays(text):
        whole = [n for n in array.shape if n and n % tokens == 0]
        large = heads and whole and array.n_bytes >= 2 * heads * tokens**2
        if len(whole) > 1 or large:
            found.append(array)
    found.sort(key=lambda a: (-prod(a.shape), a.dtype))
    return tuple(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in found)
