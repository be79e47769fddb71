"""Which parameters are matrices, and their shapes as a published checkpoint has them.

A checkpoint has a layer's kernel [*in, *out] as one matrix, and a vector of heads as one vector.
What an optimizer makes of it must not depend on how it is held here, so one that looks at more than
single elements is shown this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Names = Sequence[str | None]

# Logical axes that the next dim belongs to if it has no name of its own: that of a head's features.
HEADS = frozenset({"heads", "kv_heads"})
# Parameters of two dims that are tables of vectors.
TABLES = frozenset({"modulation"})


def groups(axes: Names) -> list[int]:
    """Where the dims begin that a checkpoint has as one."""
    firsts: list[int] = []
    for i, name in enumerate(axes):
        of_head = name is None and i > 0 and axes[i - 1] in HEADS
        if not of_head:
            firsts.append(i)
    return firsts


def published_shape(shape: Sequence[int], axes: Names) -> tuple[int, ...]:
    """The shape of one layer's parameter with the dims of every group joined; a kernel's is [in,
    out]."""
    firsts = groups(axes)
    return tuple(prod(shape[a:b]) for a, b in zip(firsts, [*firsts[1:], len(shape)]))


def is_matrix(part: str, name: str, axes: Names) -> bool:
    """Whether a parameter maps hidden states to hidden states: neither a vector or a table of them,
    nor an embedding, nor a head.

    Args:
      name: the last key of its path.
    """
    is_end = part == "entry" or "vocab" in axes
    return len(groups(axes)) == 2 and not is_end and name not in TABLES
