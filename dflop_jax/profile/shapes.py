"""Chooses the shapes to time, from the data that a run will see."""

from __future__ import annotations

from collections.abc import Callable

from dflop_jax.contract import MultimodalModel
from dflop_jax.data.media.medium import TEXT_MODULE
from dflop_jax.hardware import GIB
from dflop_jax.records import DataProfile, Shape

# Of the largest sample's tokens or pieces, in the largest shape that is timed; prices are believed
# only up to a multiple of that.
LARGEST_OVER_SAMPLE = 4

# Bytes of XLA's CPU programs over those that traces count: of a nano Qwen3-VL with 1,000 to 4,000
# tokens 1.8 were measured in the tower, 2.9 to 3.7 in the LLM, whose attention masks a square.
_MIN_OVER_TRACE, _MAX_OVER_TRACE = 1.7, 4.0


def shapes_to_time(
    data: DataProfile, model: MultimodalModel, token_multiple: int
) -> dict[str, list[Shape]]:
    """Per-rank shapes of every module, from a few pieces to several of the largest samples.

    The last shape of a module is a large one. A module that the data do not use gets small shapes,
    so that its plans have prices.
    """
    return {
        m: _module_shapes(data, m, model.piece_tokens.get(m), token_multiple) for m in model.modules
    }


def _module_shapes(
    data: DataProfile, module: str, piece_tokens: int | None, token_multiple: int
) -> list[Shape]:
    max_pieces = max(len(load.lengths(module)) for load in data.loads)
    if not max_pieces:
        tokens = piece_tokens or token_multiple
        return [Shape(1, tokens), Shape(2, tokens)]
    if piece_tokens:
        counts = (
            max_pieces // 8,
            max_pieces // 2,
            max_pieces,
            LARGEST_OVER_SAMPLE * max_pieces,
        )
        rows = {max(min_rows, n) for min_rows, n in enumerate(counts, 1)}
        return [Shape(n, piece_tokens) for n in sorted(rows)]

    def round_up(tokens: float) -> int:
        return max(token_multiple, -(-int(tokens) // token_multiple) * token_multiple)

    longest_piece = max(n for load in data.loads for n in load.lengths(module))
    largest_sample = max(load.tokens(module) for load in data.loads)
    longest = round_up(longest_piece)
    capacities = sorted({round_up(longest / 4), longest, round_up(longest * 2)})
    shapes = [Shape(1, tokens) for tokens in capacities]
    largest = Shape(max(2, -(-LARGEST_OVER_SAMPLE * largest_sample // longest)), longest)
    shapes += [Shape(4, capacities[0]), largest]
    return shapes


def shapes_within(
    shapes: dict[str, list[Shape]], memory_bytes: float, bytes_of: Callable[[str, Shape], float]
) -> dict[str, list[Shape]]:
    """The shapes whose CPU programs need at most `memory_bytes`; the smallest shape and a row of
    the longest piece are always included.

    Args:
      bytes_of: bytes that a trace of a module's program counts at a shape.

    Raises:
      ValueError: a row of the longest piece needs more than `memory_bytes`.
    """
    max_bytes, fitting = memory_bytes / _MAX_OVER_TRACE, {}
    for module, module_shapes in shapes.items():
        longest = Shape(1, module_shapes[-1].tokens)
        needed_bytes = _MIN_OVER_TRACE * bytes_of(module, longest)
        if needed_bytes > memory_bytes:
            flag = "--data.max_tokens or " * (module == TEXT_MODULE) + "--data.max_pixels"
            raise ValueError(
                f"the largest sample has {longest.tokens:,} tokens of {module!r} in a row, for "
                f"which training needs about {needed_bytes / GIB:.1f} GiB; "
                f"{memory_bytes / GIB:.1f} GiB of host memory are free for a device; lower {flag}"
            )
        required = min(module_shapes), longest
        fitting[module] = [
            s for s in module_shapes if s in required or bytes_of(module, s) <= max_bytes
        ]
    return fitting
