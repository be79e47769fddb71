"""One group of microbatches as host arrays: tiles dealt to vision ranks, samples packed in rows.

Shape legend: M microbatches, V vision data ranks of T tiles, D LLM data ranks of R rows of L
tokens. Data rank r owns the items [r*T, (r+1)*T) and the rows [r*R, (r+1)*R).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.data.sample import Sample, VisionSpec
from dflop_jax.records import Bucket, Microbatch, SampleShape, Schedule

Samples = Mapping[int, Sample] | Sequence[Sample]
Shapes = Mapping[int, SampleShape] | Sequence[SampleShape]


@dataclass(frozen=True)
class Ranks:
    """Data ranks whose arrays this process fills, and those of them that it counts: a rank on
    devices of several processes is filled by each and counted by one."""

    vision: Collection[int]
    llm: Collection[int]
    counts_vision: Collection[int]
    counts_llm: Collection[int]

    @classmethod
    def all(cls, vision: int, llm: int) -> Ranks:
        """Every rank, as one process alone has them."""
        return cls(range(vision), range(llm), range(vision), range(llm))


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """Arrays of one group.

    fields["vision"] (absent when the bucket has no tiles): pixels uint8 [M, V*T, px, px, 3].
    fields["llm"]: tokens, segment_ids, positions, targets int32, weights float32, is_visual bool,
      all [M, D*R, L]. Segment ids count from 1 in each row, 0 is padding; positions restart in
      each sample; weights are 1 where `targets` is a supervised token of the same sample.
    visual_index: int32 [M, D*R, L], index into the microbatch's encoder output flattened to
      [V*T*tokens_per_tile], or -1 where the token is text or padding.
    supervised_tokens: number of weights that are 1.
    used_tiles, used_tokens: of the M*V*T tiles and M*D*R*L tokens, those that are not padding.

    With `ranks` only their parts are filled, and only those that they count are counted.
    """

    fields: dict[str, dict[str, np.ndarray]]
    visual_index: np.ndarray
    supervised_tokens: int
    used_tiles: int
    used_tokens: int


def pack_group(
    group: Sequence[Microbatch],
    bucket: Bucket,
    samples: Samples,
    *,
    shapes: Shapes,
    vision_ranks: int,
    llm_ranks: int,
    spec: VisionSpec,
    spread: bool = True,
    ranks: Ranks | None = None,
) -> PackedGroup:
    """Pack the microbatches of a group, all padded to `bucket`.

    Args:
      samples: of the global batch those that the ranks hold a part of (see `own_samples`);
        microbatches name its members by index.
      shapes: of the whole global batch; a sample may be smaller than its shape, not larger.
      spread: deal the tiles of a microbatch evenly over the vision ranks, in the order of its
        samples; otherwise a sample's tiles stay on the vision rank of its LLM rank, and the two
        modules must have equally many ranks.
    """
    ranks = ranks or Ranks.all(vision_ranks, llm_ranks)
    n, items, rows = len(group), vision_ranks * bucket.tiles, llm_ranks * bucket.rows
    pixels = np.zeros((n, items, spec.tile_px, spec.tile_px, 3), np.uint8)
    llm = {
        name: np.zeros((n, rows, bucket.tokens), np.int32)
        for name in ("tokens", "segment_ids", "positions", "targets")
    }
    llm["weights"] = np.zeros((n, rows, bucket.tokens), np.float32)
    visual_index = np.full((n, rows, bucket.tokens), -1, np.int32)
    used_tiles = 0
    for m, microbatch in enumerate(group):
        slots = tile_slots(microbatch, bucket, shapes, vision_ranks, spread)
        for i, slot in slots.items():
            tiles = _tiles(samples, i)
            filled = slot[: len(tiles)]  # a sample that was replaced may have fewer
            here = _in_ranks(filled, bucket, ranks.vision)
            pixels[m, filled[here]] = tiles[here]
            used_tiles += int(_in_ranks(filled[here], bucket, ranks.counts_vision).sum())
        assert len(microbatch.rows) <= llm_ranks, (len(microbatch.rows), llm_ranks)
        for rank in sorted(r for r in ranks.llm if r < len(microbatch.rows)):
            rank_rows = microbatch.rows[rank]
            assert len(rank_rows) <= bucket.rows, (len(rank_rows), bucket)
            for k, row in enumerate(rank_rows):
                at = rank * bucket.rows + k
                views = {name: array[m, at] for name, array in llm.items()}
                _pack_row(row, samples, slots, spec, views, visual_index[m, at])
    counted = [r * bucket.rows + k for r in sorted(ranks.counts_llm) for k in range(bucket.rows)]
    fields = {"llm": {**llm, "is_visual": visual_index >= 0}}
    if bucket.tiles:
        fields = {"vision": {"pixels": pixels}, **fields}
    return PackedGroup(
        fields=fields,
        visual_index=visual_index,
        supervised_tokens=int(llm["weights"][:, counted].sum(dtype=np.float64)),
        used_tiles=used_tiles,
        used_tokens=int((llm["segment_ids"][:, counted] > 0).sum()),
    )


def _tiles(samples: Samples, i: int) -> np.ndarray:
    """Tiles of a sample, none of one that this process does not hold."""
    held = i in samples if isinstance(samples, Mapping) else True
    return samples[i].tiles if held else np.zeros((0, 1, 1, 3), np.uint8)


def _in_ranks(slots: np.ndarray, bucket: Bucket, ranks: Collection[int]) -> np.ndarray:
    """Whether each slot belongs to one of the vision ranks."""
    return np.isin(slots // max(bucket.tiles, 1), list(ranks))


def own_samples(
    schedule: Schedule,
    buckets: Sequence[Bucket],
    shapes: Shapes,
    vision_ranks: int,
    spread: bool,
    ranks: Ranks,
) -> list[int]:
    """Which samples of the batch the ranks hold tiles or tokens of, sorted."""
    own: set[int] = set()
    for group in schedule.groups:
        for microbatch in group:
            bucket = buckets[microbatch.bucket]
            own |= {i for r, rows in enumerate(microbatch.rows) if r in ranks.llm
                    for row in rows for i in row}  # fmt: skip
            slots = tile_slots(microbatch, bucket, shapes, vision_ranks, spread)
            own |= {i for i, at in slots.items() if _in_ranks(at, bucket, ranks.vision).any()}
    return sorted(own)


def tile_slots(
    microbatch: Microbatch,
    bucket: Bucket,
    shapes: Shapes,
    vision_ranks: int,
    spread: bool,
) -> dict[int, np.ndarray]:
    """Where each sample's tiles go among the V*T items of the microbatch: int [n tiles] each.

    From shapes alone, so that every process knows it of samples that it does not decode.
    """
    if vision_ranks == 0:
        return {i: np.zeros(0, np.int64) for i in microbatch.samples}
    if spread:
        total = sum(shapes[i].tiles for i in microbatch.samples)
        # as even as whole tiles allow: the first ranks hold one more
        counts = [len(part) for part in np.array_split(np.arange(total), vision_ranks)]
        order = microbatch.samples
    else:
        assert len(microbatch.rows) <= vision_ranks, "blind packing needs equally many ranks"
        ranks = [[i for row in rank for i in row] for rank in microbatch.rows]
        counts = [sum(shapes[i].tiles for i in rank) for rank in ranks]
        order = tuple(i for rank in ranks for i in rank)
    assert max(counts, default=0) <= bucket.tiles, (counts, bucket)
    free = [r * bucket.tiles + np.arange(count) for r, count in enumerate(counts)]
    slots = np.concatenate([np.zeros(0, np.int64), *free])
    ends = np.cumsum([shapes[i].tiles for i in order], dtype=np.int64)
    return dict(zip(order, np.split(slots, ends[:-1]), strict=True)) if order else {}


def _pack_row(
    row: Sequence[int],
    samples: Samples,
    slots: Mapping[int, np.ndarray],
    spec: VisionSpec,
    llm: Mapping[str, np.ndarray],
    visual_index: np.ndarray,
) -> None:
    """Write the samples of a row one after another into the row's views [L]."""
    start = 0
    for segment, i in enumerate(row, 1):
        sample = samples[i]
        stop = start + len(sample.tokens)
        assert stop <= len(visual_index), f"row {tuple(row)} overflows {len(visual_index)} tokens"
        llm["tokens"][start:stop] = sample.tokens
        llm["segment_ids"][start:stop] = segment
        llm["positions"][start:stop] = np.arange(stop - start)
        llm["targets"][start : stop - 1] = sample.tokens[1:]
        llm["weights"][start : stop - 1] = sample.supervised[1:]
        is_visual = sample.visual >= 0
        tile, token = np.divmod(sample.visual[is_visual], spec.tokens_per_tile)
        visual_index[start:stop][is_visual] = slots[i][tile] * spec.tokens_per_tile + token
        start = stop
