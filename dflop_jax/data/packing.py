"""One group of microbatches as host arrays: encoder items dealt to ranks, samples packed in rows.

Shape legend: M microbatches, V data ranks of an encoder of T items (tiles, windows), D LLM data
ranks of R rows of L tokens, K sources of a token. Data rank r owns the items [r*T, (r+1)*T) and
the rows [r*R, (r+1)*R).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.data.sample import MediaSpec, Sample
from dflop_jax.records import Bucket, Microbatch, SampleShape, Schedule

Samples = Mapping[int, Sample] | Sequence[Sample]
Shapes = Mapping[int, SampleShape] | Sequence[SampleShape]
DataRanks = Mapping[str, int]  # of each module


@dataclass(frozen=True)
class Ranks:
    """By module, the data ranks whose arrays this process fills, and those of them that it counts:
    a rank on devices of several processes is filled by each and counted by one."""

    fills: Mapping[str, Collection[int]]
    counts: Mapping[str, Collection[int]]

    @classmethod
    def all(cls, data_ranks: DataRanks) -> Ranks:
        """Every rank, as one process alone has them."""
        every = {module: range(n) for module, n in data_ranks.items()}
        return cls(every, every)


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """Arrays of one group.

    fields["vision"]: pixels uint8 [M, V*T, px, px, 3]; fields["audio"]: mel float32
      [M, V*T, n_mels, frames] and mel_frames int32 [M, V*T]; absent when the bucket has no such
      items.
    fields["llm"]: tokens, segment_ids, positions, targets int32, weights float32, is_visual,
      is_newline bool, all [M, D*R, L]. Segment ids count from 1 in each row, 0 is padding;
      positions restart in each sample; weights are 1 where `targets` is a supervised token of the
      same sample.
    sources[encoder]: (index int32 [M, D*R, L, K],) into the microbatch's features flattened to
      [V*T*features_per_item], -1 where there are fewer or none; with weights float32 of the same
      shape where K > 1.
    supervised_tokens: number of weights that are 1.
    used: by module, of the M*V*T items or M*D*R*L tokens those that are not padding.

    With `ranks` only their parts are filled, and only those that they count are counted.
    """

    fields: dict[str, dict[str, np.ndarray]]
    sources: dict[str, tuple[np.ndarray, ...]]
    supervised_tokens: int
    used: dict[str, int]


def pack_group(
    group: Sequence[Microbatch],
    bucket: Bucket,
    samples: Samples,
    *,
    shapes: Shapes,
    data_ranks: DataRanks,
    spec: MediaSpec,
    spread: bool = True,
    ranks: Ranks | None = None,
) -> PackedGroup:
    """Fill one group of a schedule.

    Args:
      samples: by index, of the global batch those that the ranks hold a part of (see
        `own_samples`); microbatches name its members by index.
      shapes: of the whole global batch; a sample may be smaller than its shape, not larger.
      spread: deal the items of a microbatch evenly over the encoder's ranks, in the order of its
        samples; otherwise a sample's items stay on the encoder's rank of its LLM rank, and the two
        modules must have equally many ranks.
    """
    ranks = ranks or Ranks.all(data_ranks)
    encoders = [m for m in data_ranks if m != "llm" and bucket.items(m)]
    n, llm_ranks = len(group), data_ranks["llm"]
    rows = (n, llm_ranks * bucket.rows, bucket.tokens)
    media = {m: _no_media(spec, m, n, data_ranks[m] * bucket.items(m)) for m in encoders}
    llm = {
        name: np.zeros(rows, np.int32) for name in ("tokens", "segment_ids", "positions", "targets")
    }
    llm |= {name: np.zeros(rows, bool) for name in ("is_visual", "is_newline")}
    llm["weights"] = np.zeros(rows, np.float32)
    sources = {m: _no_sources(rows, spec.sources if m == "vision" else 1) for m in encoders}
    used = dict.fromkeys(data_ranks, 0)
    for at, microbatch in enumerate(group):
        slots = {
            m: item_slots(microbatch, bucket, shapes, m, v, spread)
            for m, v in data_ranks.items()
            if m != "llm"
        }
        for m in encoders:
            for i, slot in slots[m].items():
                if isinstance(samples, Mapping) and i not in samples:
                    continue
                fields = samples[i].items(m)
                # One that was replaced may have fewer.
                slot = slot[: len(next(iter(fields.values())))]
                here = _in_ranks(slot, bucket.items(m), ranks.fills[m])
                for name, items in fields.items() if here.any() else ():
                    media[m][name][at, slot[here]] = items[here]
                used[m] += int(_in_ranks(slot[here], bucket.items(m), ranks.counts[m]).sum())
        assert len(microbatch.rows) <= llm_ranks, (len(microbatch.rows), llm_ranks)
        for rank in sorted(r for r in ranks.fills["llm"] if r < len(microbatch.rows)):
            rank_rows = microbatch.rows[rank]
            assert len(rank_rows) <= bucket.rows, (len(rank_rows), bucket)
            for k, row in enumerate(rank_rows):
                place = at, rank * bucket.rows + k
                views = {name: array[place] for name, array in llm.items()}
                taken = {m: tuple(a[place] for a in arrays) for m, arrays in sources.items()}
                _pack_row(row, samples, slots, spec, views, taken)
    counted = [r * bucket.rows + k for r in sorted(ranks.counts["llm"]) for k in range(bucket.rows)]
    used["llm"] = int((llm["segment_ids"][:, counted] > 0).sum())
    return PackedGroup(
        fields={**media, "llm": llm},
        sources=sources,
        supervised_tokens=int(llm["weights"][:, counted].sum(dtype=np.float64)),
        used=used,
    )


def _no_media(spec: MediaSpec, module: str, n: int, items: int) -> dict[str, np.ndarray]:
    """An encoder's fields [n, items, ...] of microbatches that hold nothing."""
    flat = spec.no_items(module, n * items)
    return {name: a.reshape(n, items, *a.shape[1:]) for name, a in flat.items()}


def _no_sources(rows: tuple[int, int, int], k: int) -> tuple[np.ndarray, ...]:
    index = np.full((*rows, k), -1, np.int32)
    return (index, np.zeros((*rows, k), np.float32)) if k > 1 else (index,)


def _in_ranks(slots: np.ndarray, items: int, ranks: Collection[int]) -> np.ndarray:
    """Whether each slot belongs to one of the ranks, of so many items each."""
    return np.isin(slots // max(items, 1), list(ranks))


def own_samples(
    schedule: Schedule,
    buckets: Sequence[Bucket],
    shapes: Shapes,
    data_ranks: DataRanks,
    spread: bool,
    ranks: Ranks,
) -> list[int]:
    """Which samples of the batch the ranks hold items or tokens of, sorted."""
    own: set[int] = set()
    for group in schedule.groups:
        for microbatch in group:
            bucket = buckets[microbatch.bucket]
            own |= {i for r, rows in enumerate(microbatch.rows) if r in ranks.fills["llm"]
                    for row in rows for i in row}  # fmt: skip
            for m, n in data_ranks.items():
                if m != "llm":
                    slots = item_slots(microbatch, bucket, shapes, m, n, spread)
                    own |= {i for i, at in slots.items()
                            if _in_ranks(at, bucket.items(m), ranks.fills[m]).any()}  # fmt: skip
    return sorted(own)


def item_slots(
    microbatch: Microbatch,
    bucket: Bucket,
    shapes: Shapes,
    module: str,
    n_ranks: int,
    spread: bool,
) -> dict[int, np.ndarray]:
    """Where each sample's items go among the V*T of the microbatch: int [n items] each.

    From shapes alone, so that every process knows it of samples that it does not decode.
    """
    items = {i: shapes[i].load(module) for i in microbatch.samples}
    room = bucket.items(module)
    if spread:
        # as even as whole items allow: the first ranks hold one more
        parts = np.array_split(np.arange(sum(items.values())), n_ranks)
        counts = [len(part) for part in parts]
        order = microbatch.samples
    else:
        assert len(microbatch.rows) <= n_ranks, "blind packing needs equally many ranks"
        ranks = [[i for row in rank for i in row] for rank in microbatch.rows]
        counts = [sum(items[i] for i in rank) for rank in ranks]
        order = tuple(i for rank in ranks for i in rank)
    assert max(counts, default=0) <= room, (counts, bucket)
    free = [r * room + np.arange(count) for r, count in enumerate(counts)]
    slots = np.concatenate([np.zeros(0, np.int64), *free])
    ends = np.cumsum([items[i] for i in order], dtype=np.int64)
    return dict(zip(order, np.split(slots, ends[:-1]), strict=True)) if order else {}


def _pack_row(
    row: Sequence[int],
    samples: Samples,
    slots: Mapping[str, Mapping[int, np.ndarray]],
    spec: MediaSpec,
    llm: Mapping[str, np.ndarray],
    sources: Mapping[str, tuple[np.ndarray, ...]],
) -> None:
    """Write the samples of a row one after another into the row's views [L] and [L, K]."""
    start, length = 0, len(llm["tokens"])
    for segment, i in enumerate(row, 1):
        sample = samples[i]
        stop = start + len(sample.tokens)
        assert stop <= length, f"row {tuple(row)} overflows {length} tokens"
        llm["tokens"][start:stop] = sample.tokens
        llm["segment_ids"][start:stop] = segment
        llm["positions"][start:stop] = np.arange(stop - start)
        llm["targets"][start : stop - 1] = sample.tokens[1:]
        llm["weights"][start : stop - 1] = sample.supervised[1:]
        llm["is_visual"][start:stop] = sample.visual.used
        llm["is_newline"][start:stop] = sample.visual.newline
        for module, (index, *weight) in sources.items():
            if module == "vision":
                k = index.shape[1]
                taken = np.where(sample.visual.weight > 0, sample.visual.index, -1)[:, :k]
                for w in weight:
                    w[start:stop] = sample.visual.weight
            elif len(sample.audio):
                taken = sample.audio[:, None]
                llm["is_visual"][start:stop] |= sample.audio >= 0
            else:
                continue
            index[start:stop] = _moved(taken, slots[module][i], spec.features_per_item(module))
        start = stop


def _moved(index: np.ndarray, slots: np.ndarray, features: int) -> np.ndarray:
    """Places among a sample's features, as places among the microbatch's; -1 stays."""
    if not len(slots):
        return index
    item, feature = np.divmod(np.maximum(index, 0), features)
    return np.where(index >= 0, slots[item] * features + feature, -1)
