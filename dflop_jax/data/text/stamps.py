"""Text around a pair of frames that says at which second it is seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.pieces import Tokenizer

Stamp = Callable[[float], tuple[tuple[int, ...], tuple[int, ...]]]


def stamp_of(tokenizer: Tokenizer | ChatTokenizer) -> Stamp:
    """Return what gives the ids before and after a pair of frames, by its second: "<0.3 seconds>"
    and the tokens that begin and end a picture, where the tokenizer has such."""
    begin, end = tokenizer.vision_ends if isinstance(tokenizer, ChatTokenizer) else ((), ())

    @lru_cache(maxsize=65536)
    def ids(text: str) -> tuple[int, ...]:
        return (*tokenizer.encode(text), *begin)

    def stamp(second: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ids(f"<{second:.1f} seconds>"), end

    return stamp
