"""Packs pieces of samples into the host arrays of microbatch groups, as a schedule assigns them.

Shape legend: M microbatches, D data ranks of R rows of L tokens each (rank r owns the rows r*R up
to (r+1)*R), K features in the weighted sum of one token. The model's field specs determine the
fields, the plan's edges the gathers; no module is known by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflop_jax.data import gathers
from dflop_jax.data.content import content_counter
from dflop_jax.data.gathers import DecodedPiece, PieceNumbers, Samples
from dflop_jax.data.shuffle import mix_bits
from dflop_jax.records import Content, Layout, Load, Schedule

if TYPE_CHECKING:  # processes that only decode do not load JAX
    from dflop_jax.contract import Module, MultimodalModel

SEGMENTS, POSITIONS, WEIGHTS, SEEDS = "segment_ids", "positions", "weights", "seeds"


@dataclass(frozen=True)
class LocalRanks:
    """Data ranks, by module, whose arrays this process fills, and ranks that it counts. If a rank
    has devices of several processes, each process fills it and one counts it."""

    filled: Mapping[str, Collection[int]]
    counted: Mapping[str, Collection[int]]

    @classmethod
    def single_process(cls, layout: Layout) -> LocalRanks:
        """Return all ranks of a plan, for a run of one process."""
        every = {module: range(layout.data_ranks(module)) for module in layout.modules}
        return cls(every, every)


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """Arrays of one group; a process fills only the rows of its ranks.

    fields: by name [M, D*R, ...], all inputs of the module that no edge brings. Segment ids count
      from 1 in each row, 0 is padding; positions count from 0 in each piece, unless samples have
      them.
    gathers: by the number of each feeding group, (index int32 [M, D*R, L, K],) into that group's
      features of the same microbatch, flattened over its ranks and rows, -1 for none; if K > 1 also
      weights float32 of the same shape.
    read_counts: by the number of each feeding group, features that each rank of this group reads
      from each rank of that group, int64 [ranks of the source, D].
    lengths, content: tokens and content of each piece on the counted ranks.
    loss_weights: the field "weights" on the counted ranks; zeros if the module has none.
    """

    fields: dict[str, np.ndarray]
    gathers: dict[int, tuple[np.ndarray, ...]]
    read_counts: dict[int, np.ndarray]
    lengths: tuple[int, ...]
    content: Content
    loss_weights: np.ndarray

    @property
    def used_tokens(self) -> int:
        return sum(self.lengths)


def local_samples(
    layout: Layout, schedule: Schedule, loads: Sequence[Load], ranks: LocalRanks
) -> list[int]:
    """Return the sorted batch indices of samples with a piece on the filled ranks."""
    needed: set[int] = set()
    for module in layout.modules:
        numbers = PieceNumbers.from_loads(loads, module)
        filled = list(ranks.filled[module])
        for group in (g for g in schedule.groups if g.module == module):
            local_pieces = group.pieces.piece_id[np.isin(group.pieces.rank, filled)]
            needed.update(numbers.sample_of(local_pieces).tolist())
    return sorted(needed)


def pack_groups(
    layout: Layout,
    schedule: Schedule,
    samples: Samples,
    loads: Sequence[Load],
    *,
    model: MultimodalModel,
    ranks: LocalRanks | None = None,
    draws: str = "",
) -> list[PackedGroup]:
    """Return the packed arrays of all groups of a schedule.

    Args:
      samples: by index in the global batch, at least those of `local_samples`; a replacement may be
        smaller than the load, not larger.
      loads: loads of the whole global batch.
      draws: name of this step's random draws, which gives the field "seeds"; "": zeros.
    """
    numbers = {module: PieceNumbers.from_loads(loads, module) for module in layout.modules}
    local_ranks = ranks or LocalRanks.single_process(layout)
    return [
        _pack_group(layout, schedule, group, samples, numbers, model, local_ranks, draws)
        for group in range(len(schedule.groups))
    ]


def _pack_group(
    layout: Layout,
    schedule: Schedule,
    group: int,
    samples: Samples,
    numbers: Mapping[str, PieceNumbers],
    model: MultimodalModel,
    ranks: LocalRanks,
    draws: str,
) -> PackedGroup:
    packed = schedule.groups[group]
    module, rows = packed.module, packed.shape.rows
    one_per_row = module in model.piece_tokens
    pieces = gathers.decoded_pieces(
        packed, numbers[module], samples, ranks.filled[module], one_per_row=one_per_row
    )
    # The model's edges, since the plan may leave out modules that the data does not use.
    from_edges = tuple(dict.fromkeys(e["name"] for e in model.edges if e["target"] == module))
    layouts = _fields_to_fill(model.modules[module], from_edges, packed.shape.tokens)
    n_rows = layout.data_ranks(module) * rows
    fields = {
        name: np.zeros((packed.microbatches, n_rows, *field.dims), field.dtype)
        for name, field in layouts.items()
    }
    for piece in pieces:
        _fill_piece(fields, layouts, piece, module, draws)
    counted_ranks = sorted(ranks.counted[module])
    weights = fields.get(WEIGHTS, np.zeros((1, n_rows)))
    counted_weights = weights.reshape(len(weights), -1, rows, *weights.shape[2:])[:, counted_ranks]
    group_gathers, read_counts = gathers.build_gathers(
        layout, schedule, group, pieces, numbers, model
    )
    counted_pieces = [p for p in pieces if p.rank in counted_ranks]
    add_content = content_counter(model)
    loads = {p.batch_index: p.sample.load for p in counted_pieces}
    content = {place: add_content(load).content_of(module) for place, load in loads.items()}
    return PackedGroup(
        fields=fields,
        gathers=group_gathers,
        read_counts=read_counts,
        lengths=tuple(p.length for p in counted_pieces),
        content=tuple(content[p.batch_index][p.piece_index] for p in counted_pieces),
        loss_weights=counted_weights,
    )


class _FieldLayout(NamedTuple):
    per_token: bool  # the field has a value for every token
    dims: tuple[int, ...]  # dimensions after the rows
    dtype: Any


@lru_cache(maxsize=256)
def _fields_to_fill(
    module: Module, from_edges: tuple[str, ...], tokens: int
) -> dict[str, _FieldLayout]:
    """Return the layout of each field that the module reads and no edge brings."""
    names = {name for fields in module.inputs.values() for name in fields} - {*from_edges}
    layouts = {}
    for name in sorted(names):
        spec, longer = (module.field_spec(name, 1, n) for n in (tokens, tokens + 1))
        layouts[name] = _FieldLayout(spec.shape != longer.shape, tuple(spec.shape[1:]), spec.dtype)
    return layouts


def _fill_piece(
    fields: Mapping[str, np.ndarray],
    layouts: Mapping[str, _FieldLayout],
    piece: DecodedPiece,
    module: str,
    draws: str,
) -> None:
    """Write a piece into its row of each field."""
    sample_fields = piece.sample.fields.get(module, {})
    if missing := layouts.keys() - sample_fields.keys() - {SEGMENTS, POSITIONS, SEEDS}:
        raise ValueError(f"a sample has no {', '.join(sorted(missing))} for module {module!r}")
    for name, field in layouts.items():
        array = fields[name]
        if name == SEGMENTS:
            array[piece.row][piece.columns] = piece.segment
        elif name == SEEDS:
            if draws:
                seed_name = f"{draws}/{module}/{piece.batch_index}/{piece.piece_index}"
                seeds = derive_seeds(seed_name, piece.length if field.per_token else 1)
                if field.per_token:
                    array[piece.row][piece.columns] = seeds
                else:
                    array[piece.row] = seeds[0]
        elif name == POSITIONS and name not in sample_fields:
            counts = np.arange(piece.length, dtype=field.dtype)
            array[piece.row][piece.columns] = counts.reshape(-1, *[1] * (len(field.dims) - 1))
        elif field.per_token:
            array[piece.row][piece.columns] = sample_fields[name][piece.tokens]
        else:
            array[piece.row] = sample_fields[name][piece.piece_index]


def derive_seeds(name: str, n: int) -> np.ndarray:
    """Return n uint32 numbers above 0, the first outputs of SplitMix64 seeded by a name's hash."""
    start = np.frombuffer(blake2b(name.encode(), digest_size=8).digest(), "<u8")
    z = mix_bits(start + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (z >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
