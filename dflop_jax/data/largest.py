"""Media of growing size, as loads: what a plan's shapes hold is found among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflop_jax.data.media.counts import text_load
from dflop_jax.data.media.kind import Header, Kind
from dflop_jax.data.media.medium import Preparation, module_of
from dflop_jax.records import Load


@dataclass(frozen=True)
class LoneMedium:
    """A medium alone, and what it asks of the modules."""

    header: Header
    load: Load


def growing(how: Preparation, kind: Kind) -> list[LoneMedium]:
    """Return media of a kind by their size, up to those that are scaled down or sampled thinner;
    [] where none is taken."""
    module = module_of(how, kind.name)
    if not module:
        return []
    medium, columns = how[module], how[module].growing(kind.name)
    n = len(next(iter(columns.values()), ()))
    columns = {name: columns.get(name, np.zeros(n, np.int64)) for name in kind.columns}
    counted = medium.count(kind.name, columns, np.ones(n, bool))
    tokens = (counted.tokens + counted.between).tolist()
    rising = []
    for k in np.flatnonzero(counted.usable).tolist():
        header = {name: int(column[k]) for name, column in columns.items()}
        lengths = (medium.piece_tokens,) * int(counted.pieces[k])
        lengths = lengths if medium.piece_tokens else medium.lengths(kind.name, header)
        rising.append(LoneMedium(header, text_load({module: lengths}, tokens[k])))
    return rising
