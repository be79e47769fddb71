"""Which parameters are matrices, and their shapes as a published checkpoint has them.

A checkpoint has a layer's kernel [*in, *out] as one matrix, and a vector of heads as one vector.
What an optimizer makes of it must not depend on how it is held here, so one that looks at more than
single elements is shown this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Names = Sequence[str | None]

# Logical axes that neighbours without a name belong to: the next, a head's features, and the one
# before, if that is not the first: queries, keys and values side by side.
HEADS = frozenset({"heads", "kv_heads"})
# Parameters that are one vector, whatever their dims.
VECTORS = frozenset({"bias", "scale"})
# Parameters of two dims that are tables of vectors.
TABLES = frozenset({"modulation", "taps"})


def groups(axes: Names) -> list[int]:
    """Where the dims begin that a checkpoint has as one."""
    firsts: list[int] = []
    for i, name in enumerate(axes):
        features = name is None and i > 0 and axes[i - 1] in HEADS
        side_by_side = name in HEADS and i > 1 and axes[i - 1] is None and axes[i - 2] not in HEADS
        if not features and not side_by_side:
            firsts.append(i)
    return firsts


def published_shape(shape: Sequence[int], name: str, axes: Names) -> tuple[int, ...]:
    """The shape of one layer's parameter with the dims of every group joined; a kernel's is [in,
    out]. `name` is the last key of its path."""
    firsts = [0] if name in VECTORS else groups(axes)
    return tuple(prod(shape[a:b]) for a, b in zip(firsts, [*firsts[1:], len(shape)]))


def is_matrix(part: str, name: str, axes: Names) -> bool:
    """Whether a parameter maps hidden states to hidden states: neither a vector or a table of them,
    nor an embedding, nor a head.

    Args:
      name: the last key of its path.
    """
    is_end = part == "entry" or "vocab" in axes
    return len(groups(axes)) == 2 and not is_end and name not in TABLES | VECTORS
