"""How tensor ranks split hidden states between layers: one rule for programs and prices."""

from __future__ import annotations

from typing import Any

import numpy as np


def token_dim(rows: int, tokens: int, ways: int) -> int | None:
    """The dim of hidden states [rows, tokens, width] that is split over tensor ranks: rows, whose
    pieces lie together in memory, else tokens, as one of them divides; None: neither."""
    if ways == 1:
        return None
    return next((dim for dim, size in enumerate((rows, tokens)) if size % ways == 0), None)


def rank_share(rows: Any, tokens: Any, ways: int) -> Any:
    """Share of hidden states [rows, tokens, width] that a tensor rank has; of numbers or arrays."""
    divides = (np.asarray(rows) % ways == 0) | (np.asarray(tokens) % ways == 0)
    return np.where(divides, 1 / ways, 1.0)[()]
