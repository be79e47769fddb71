"""One group of microbatches as host arrays: pieces of samples in the rows that a schedule says.

Shape legend: M microbatches, D data ranks of R rows of L tokens each (rank r owns the rows r*R up
to (r+1)*R), K features that one place is a weighted sum of. No module is known by name: what to
fill is read off the model's field specs, what reads what off the plan's edges.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflop_jax.data.content import counter_of
from dflop_jax.data.joins import DecodedPiece, PieceNumbers, Samples, decoded_pieces, joined
from dflop_jax.records import Content, Layout, Load, Schedule

if TYPE_CHECKING:  # processes that only decode do not load JAX
    from dflop_jax.contract import Module, MultimodalModel

SEGMENTS, POSITIONS, WEIGHTS, SEEDS = "segment_ids", "positions", "weights", "seeds"


@dataclass(frozen=True)
class Ranks:
    """The data ranks, by module, whose arrays this process fills, and those of them that it counts:
    a rank on devices of several processes is filled by each and counted by one."""

    fills: Mapping[str, Collection[int]]
    counts: Mapping[str, Collection[int]]

    @classmethod
    def all(cls, layout: Layout) -> Ranks:
        """Return every rank of a plan, as one process alone has them."""
        every = {module: range(layout.data_ranks(module)) for module in layout.modules}
        return cls(every, every)


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """Arrays of one group.

    fields: by name [M, D*R, ...], all that the module reads but what edges bring. Segment ids count
      from 1 in each row, 0 is padding; positions count from 0 in each piece, unless samples say.
    places: by the place in the schedule of each group that feeds it, (index int32 [M, D*R, L, K],)
      into that group's features of the same microbatch, flattened over its ranks and rows; -1 where
      there are fewer or none; with weights float32 of the same shape where K > 1.
    reads: by the same, how many features each rank of this group reads from each of that group's,
      int64 [ranks of the source, D].
    lengths, content: tokens of each of its pieces, and what it asks beside; the rest is padding.
    loss_weights: the field "weights", zeros without one.

    With `ranks` only their rows are filled, and only those that they count are counted.
    """

    fields: dict[str, np.ndarray]
    places: dict[int, tuple[np.ndarray, ...]]
    reads: dict[int, np.ndarray]
    lengths: tuple[int, ...]
    content: Content
    loss_weights: np.ndarray

    @property
    def used_tokens(self) -> int:
        return sum(self.lengths)


def own_samples(
    layout: Layout, schedule: Schedule, loads: Sequence[Load], ranks: Ranks
) -> list[int]:
    """Return which samples of the batch have a piece in a row that the ranks fill, sorted."""
    needed: set[int] = set()
    for module in layout.modules:
        numbers = PieceNumbers.of(loads, module)
        filled = list(ranks.fills[module])
        for group in (g for g in schedule.groups if g.module == module):
            pieces = group.pieces.piece_id[np.isin(group.pieces.rank, filled)]
            needed.update(numbers.sample(pieces).tolist())
    return sorted(needed)


def pack_groups(
    layout: Layout,
    schedule: Schedule,
    samples: Samples,
    loads: Sequence[Load],
    *,
    model: MultimodalModel,
    ranks: Ranks | None = None,
    draws: str = "",
) -> list[PackedGroup]:
    """Fill all groups of a schedule.

    Args:
      samples: by their place in the global batch, those that the ranks hold a part of (see
        `own_samples`); one that was replaced may be smaller than its load, not larger.
      loads: of the whole global batch.
      ranks: None: all.
      draws: names the draws of this step, of which the field "seeds" is made; "": nothing is drawn.
    """
    numbers = {module: PieceNumbers.of(loads, module) for module in layout.modules}
    held = ranks or Ranks.all(layout)
    return [
        _packed(layout, schedule, group, samples, numbers, model, held, draws)
        for group in range(len(schedule.groups))
    ]


def _packed(
    layout: Layout,
    schedule: Schedule,
    group: int,
    samples: Samples,
    numbers: Mapping[str, PieceNumbers],
    model: MultimodalModel,
    ranks: Ranks,
    draws: str,
) -> PackedGroup:
    packed = schedule.groups[group]
    module, rows = packed.module, packed.shape.rows
    alone = module in model.piece_tokens
    pieces = decoded_pieces(packed, numbers[module], samples, ranks.fills[module], alone=alone)
    # Of the model, not the plan, which may leave out modules that the data does not use.
    from_edges = tuple(dict.fromkeys(e["name"] for e in model.edges if e["target"] == module))
    reads = _reads(model.modules[module], from_edges, packed.shape.tokens)
    n_rows = layout.data_ranks(module) * rows
    fields = {
        name: np.zeros((packed.microbatches, n_rows, *field.dims), field.dtype)
        for name, field in reads.items()
    }
    for piece in pieces:
        _fill(fields, reads, piece, module, draws)
    counts = sorted(ranks.counts[module])
    weights = fields.get(WEIGHTS, np.zeros((1, n_rows)))
    of_counted = weights.reshape(len(weights), -1, rows, *weights.shape[2:])[:, counts]
    places, read_features = joined(layout, schedule, group, pieces, numbers, model)
    own = [p for p in pieces if p.rank in counts]
    counted, loads = counter_of(model), {p.place: p.sample.load for p in own}
    asked = {place: counted(load).content_of(module) for place, load in loads.items()}
    return PackedGroup(
        fields=fields,
        places=places,
        reads=read_features,
        lengths=tuple(p.length for p in own),
        content=tuple(asked[p.place][p.order] for p in own),
        loss_weights=of_counted,
    )


class _Field(NamedTuple):
    """Whether a field has a value for every token, its dims after the rows, and its dtype."""

    per_token: bool
    dims: tuple[int, ...]
    dtype: Any


@lru_cache(maxsize=256)
def _reads(module: Module, from_edges: tuple[str, ...], tokens: int) -> dict[str, _Field]:
    """Return every field that the module reads and no edge brings."""
    names = {name for fields in module.inputs.values() for name in fields} - {*from_edges}
    reads = {}
    for name in sorted(names):
        spec, longer = (module.field_spec(name, 1, n) for n in (tokens, tokens + 1))
        reads[name] = _Field(spec.shape != longer.shape, tuple(spec.shape[1:]), spec.dtype)
    return reads


def _fill(
    fields: Mapping[str, np.ndarray],
    reads: Mapping[str, _Field],
    piece: DecodedPiece,
    module: str,
    draws: str,
) -> None:
    """Write a piece into its row of every field."""
    given = piece.sample.fields.get(module, {})
    if lacks := reads.keys() - given.keys() - {SEGMENTS, POSITIONS, SEEDS}:
        raise ValueError(f"a sample has no {', '.join(sorted(lacks))} for module {module!r}")
    for name, field in reads.items():
        array = fields[name]
        if name == SEGMENTS:
            array[piece.row][piece.room] = piece.segment
        elif name == SEEDS:
            if draws:
                about = f"{draws}/{module}/{piece.place}/{piece.order}"
                room = (*piece.row, piece.room) if field.per_token else piece.row
                array[room] = seeds(about, piece.length) if field.per_token else seeds(about, 1)[0]
        elif name == POSITIONS and name not in given:
            counts = np.arange(piece.length, dtype=field.dtype)
            array[piece.row][piece.room] = counts.reshape(-1, *[1] * (len(field.dims) - 1))
        elif field.per_token:
            array[piece.row][piece.room] = given[name][piece.tokens]
        else:
            array[piece.row] = given[name][piece.order]


def seeds(name: str, n: int) -> np.ndarray:
    """Numbers uint32 [n] above 0 that follow from a name: the first outputs of SplitMix64 (Steele,
    Lea and Flood, OOPSLA 2014) that begins with the name's hash."""
    begin = np.frombuffer(blake2b(name.encode(), digest_size=8).digest(), "<u8")
    z = begin + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
