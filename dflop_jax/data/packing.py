"""One group of microbatches as host arrays: tiles dealt to vision ranks, samples packed in rows.

Shape legend: M microbatches, V vision data ranks of T tiles, D LLM data ranks of R rows of L
tokens. Data rank r owns the items [r*T, (r+1)*T) and the rows [r*R, (r+1)*R).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.data.sample import Sample, VisionSpec
from dflop_jax.records import Bucket, Microbatch

Samples = Mapping[int, Sample] | Sequence[Sample]


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
    vision_ranks: int,
    llm_ranks: int,
    spec: VisionSpec,
    spread: bool = True,
) -> PackedGroup:
    """Pack the microbatches of a group, all padded to `bucket`.

    Args:
      samples: the global batch; microbatches name its members by index.
      spread: deal the tiles of a microbatch evenly over the vision ranks, in the order of its
        samples; otherwise a sample's tiles stay on the vision rank of its LLM rank, and the two
        modules must have equally many ranks.
    """
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
        slots = tile_slots(microbatch, bucket, samples, vision_ranks, spread)
        for i, slot in slots.items():
            pixels[m, slot] = samples[i].tiles
            used_tiles += len(slot)
        assert len(microbatch.rows) <= llm_ranks, (len(microbatch.rows), llm_ranks)
        for rank, rank_rows in enumerate(microbatch.rows):
            assert len(rank_rows) <= bucket.rows, (len(rank_rows), bucket)
            for k, row in enumerate(rank_rows):
                at = rank * bucket.rows + k
                views = {name: array[m, at] for name, array in llm.items()}
                _pack_row(row, samples, slots, spec, views, visual_index[m, at])
    fields = {"llm": {**llm, "is_visual": visual_index >= 0}}
    if bucket.tiles:
        fields = {"vision": {"pixels": pixels}, **fields}
    return PackedGroup(
        fields=fields,
        visual_index=visual_index,
        supervised_tokens=int(llm["weights"].sum(dtype=np.float64)),
        used_tiles=used_tiles,
        used_tokens=int((llm["segment_ids"] > 0).sum()),
    )


def tile_slots(
    microbatch: Microbatch, bucket: Bucket, samples: Samples, vision_ranks: int, spread: bool
) -> dict[int, np.ndarray]:
    """Where each sample's tiles go among the V*T items of the microbatch: int [n tiles] each."""
    if spread:
        total = sum(len(samples[i].tiles) for i in microbatch.samples)
        # as even as whole tiles allow: the first ranks hold one more
        counts = [len(part) for part in np.array_split(np.arange(total), vision_ranks)]
        order = microbatch.samples
    else:
        assert len(microbatch.rows) <= vision_ranks, "blind packing needs equally many ranks"
        ranks = [[i for row in rank for i in row] for rank in microbatch.rows]
        counts = [sum(len(samples[i].tiles) for i in rank) for rank in ranks]
        order = tuple(i for rank in ranks for i in rank)
    assert max(counts, default=0) <= bucket.tiles, (counts, bucket)
    free = [r * bucket.tiles + np.arange(count) for r, count in enumerate(counts)]
    slots = np.concatenate([np.zeros(0, np.int64), *free])
    ends = np.cumsum([len(samples[i].tiles) for i in order], dtype=np.int64)
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
