"""Packing against a naive packer that writes one token after the other, from the definitions."""

import numpy as np
import pytest

from dflop_jax.data import pack_groups
from dflop_jax.data.gathers import count_features as counted
from dflop_jax.data.packing import LocalRanks, derive_seeds, local_samples
from dflop_jax.data.sample import EMPTY, FeatureGather, Sample
from dflop_jax.records import Load, Schedule, Shape, first_piece_numbers, piece_positions
from tests.data.graphs import BLOCKS, EDGES, random_case
from tests.rows import group_of_rows, rows_of

FEATURES = {"a": 3}  # of a row; the others' follow its tokens


def features_of(module, tokens):
    return FEATURES.get(module) or tokens // BLOCKS[module].merge


def nested(case, group):
    return rows_of(group, case.plan.layout.data_ranks(group.module))


def rows_at(case, group):
    """((microbatch, row over all ranks), pieces) of every row."""
    for m, microbatch in enumerate(nested(case, group)):
        for r, rank in enumerate(microbatch):
            for k, row in enumerate(rank):
                yield (m, r * group.shape.rows + k), row


def naive_fields(case, group):
    """Every field of a group, written token by token."""
    g = case.schedule.groups[group]
    pieces, ranks = piece_positions(case.loads, g.module), case.plan.layout.data_ranks(g.module)
    rows = (g.microbatches, ranks * g.shape.rows)
    if g.module == "a":
        made = {"picture": np.zeros((*rows, 2, 3), np.uint8), "size": np.zeros(rows, np.int32)}
    else:
        made = {n: np.zeros((*rows, g.shape.tokens), np.int32)
                for n in ("token", "segment_ids", "positions")}  # fmt: skip
        if BLOCKS[g.module].loss:
            made["weights"] = np.zeros((*rows, g.shape.tokens), np.float32)
    used = 0
    for at, row in rows_at(case, g):
        t = 0
        for segment, piece in enumerate(row, 1):
            s, order = pieces[piece]
            x, lengths = case.samples[s], case.samples[s].load.lengths(g.module)
            length = lengths[order] if order < len(lengths) else 0
            before = sum(lengths[:order])
            used += length
            for j in range(length if g.module != "a" else 0):
                made["token"][at][t + j] = x.fields[g.module]["token"][before + j]
                made["segment_ids"][at][t + j] = segment
                made["positions"][at][t + j] = j
                if "weights" in made:
                    made["weights"][at][t + j] = x.fields[g.module]["weights"][before + j]
            if g.module == "a" and length:
                for name in made:
                    made[name][at] = x.fields["a"][name][order]
            t += case.loads[s].lengths(g.module)[order]
    return made, used


def owners(case, source):
    """(feeding group, microbatch, flat feature) -> (sample, its feature), of a whole module."""
    found = {}
    pieces = piece_positions(case.loads, source)
    for i, g in enumerate(case.schedule.groups):
        if g.module != source:
            continue
        per_row = features_of(source, g.shape.tokens)
        for (m, r), row in rows_at(case, g):
            t = 0
            for piece in row:
                s, order = pieces[piece]
                real = case.samples[s].load.lengths(source)
                features = [features_of(source, n) for n in (*real, 0)]
                begin = sum(features[:order])
                for j in range(features[order] if order < len(real) else 0):
                    inside = 0 if source == "a" else t * per_row // g.shape.tokens
                    found[i, m, r * per_row + inside + j] = (s, begin + j)
                t += case.loads[s].lengths(source)[order]
    return found


def check_places(case, group, packed):
    """Every place of every token names the feature that its sample names, in one feeding group."""
    g = case.schedule.groups[group]
    pieces = piece_positions(case.loads, g.module)
    for edge in (e for e in EDGES if e.target == g.module):
        whose, feeders = owners(case, edge.source), case.schedule.fed_by(group, edge.source)
        left = {f: packed.gathers[f][0].copy() for f in feeders}
        for at, row in rows_at(case, g):
            t = 0
            for piece in row:
                s, order = pieces[piece]
                real = case.samples[s].load.lengths(g.module)
                joins = case.samples[s].gathers.get((edge.source, edge.target))
                before = sum(real[:order])
                for j in range(real[order] if joins and order < len(real) else 0):
                    for c in range(edge.sources):
                        wanted = joins.index[before + j, c]
                        here = [f for f in feeders if left[f][at][t + j, c] >= 0]
                        assert len(here) == (wanted >= 0)
                        for f in here:
                            flat = int(left[f][at][t + j, c])
                            assert whose[f, at[0], flat] == (s, wanted)
                            left[f][at][t + j, c] = -1
                            if edge.sources > 1:
                                weight = packed.gathers[f][1][at][t + j, c]
                                assert weight == joins.weight[before + j, c]
                t += case.loads[s].lengths(g.module)[order]
        for f in feeders:
            assert (left[f] == -1).all()
            check_reads(case, case.schedule.groups[f], g, packed, f)
            assert len(packed.gathers[f]) == 1 + (edge.sources > 1)
            if edge.sources > 1:
                index, weight = packed.gathers[f]
                assert not weight[index < 0].any()


def check_reads(case, source, target, packed, feeder):
    """Each rank of the target counts every feature that it reads once, by the rank that has it."""
    low, high = (case.plan.layout.data_ranks(g.module) for g in (source, target))
    per_rank = source.shape.rows * features_of(source.module, source.shape.tokens)
    read = {
        (r // target.shape.rows, m, int(flat))
        for (m, r, _, _), flat in np.ndenumerate(packed.gathers[feeder][0])
        if flat >= 0
    }
    counts = np.zeros((low, high), int)
    for rank, _, flat in read:
        counts[flat // per_rank, rank] += 1
    np.testing.assert_array_equal(packed.read_counts[feeder], counts)


def packed_of(case, *, samples=None, model=None, **options):
    samples, model = samples or case.samples, model or case.model
    layout, schedule = case.plan.layout, case.schedule
    return pack_groups(layout, schedule, samples, case.loads, model=model, **options)


@pytest.mark.parametrize("smaller", [0.0, 0.5])
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_every_token_and_feature_is_where_it_belongs(seed, group_size, smaller):
    rng = np.random.default_rng([seed, group_size])
    case = random_case(rng, group_size=group_size, smaller=smaller)
    for i, (g, packed) in enumerate(zip(case.schedule.groups, packed_of(case), strict=True)):
        fields, used = naive_fields(case, i)
        assert packed.fields.keys() == fields.keys()
        for name, array in fields.items():
            np.testing.assert_array_equal(packed.fields[name], array)
            assert packed.fields[name].dtype == array.dtype
        assert packed.used_tokens == used
        weights = fields.get("weights", np.zeros(1))
        assert packed.loss_weights.sum(dtype=float) == pytest.approx(weights.sum(dtype=float))
        sources = case.plan.layout.sources(g.module)
        assert set(packed.gathers) == {f for m in sources for f in case.schedule.fed_by(i, m)}
        check_places(case, i, packed)


class Seeded:
    """A module, or a model of such, that also reads numbers of its tokens or pieces."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def modules(self):
        return {name: Seeded(module) for name, module in self.inner.modules.items()}

    @property
    def inputs(self):
        return {**self.inner.inputs, "adapter": ("seeds",)}

    def field_spec(self, name, rows, tokens):
        if name != "seeds":
            return self.inner.field_spec(name, rows, tokens)
        packs = "segment_ids" in {n for names in self.inner.inputs.values() for n in names}
        return np.zeros((rows, tokens) if packs else rows, np.uint32)


@pytest.mark.parametrize("draws", ["3/0", ""])
@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_tokens_follow_from_the_sample_and_the_place_in_it(seed, draws):
    case = random_case(np.random.default_rng(seed), group_size=2, smaller=0.3)
    found = {}
    every = packed_of(case, model=Seeded(case.model), draws=draws)
    for g, packed in zip(case.schedule.groups, every, strict=True):
        numbers, want = packed.fields["seeds"], np.zeros_like(packed.fields["seeds"])
        assert numbers.dtype == np.uint32
        pieces = piece_positions(case.loads, g.module)
        for at, row in rows_at(case, g):
            t = 0
            for piece in row:
                s, order = pieces[piece]
                lengths = case.samples[s].load.lengths(g.module)
                length = lengths[order] if order < len(lengths) else 0
                drawn = derive_seeds(f"{draws}/{g.module}/{s}/{order}", length) * (draws != "")
                if want.ndim == 3:
                    want[at][t : t + length] = drawn
                elif length:
                    want[at] = drawn[0]
                found.update({(g.module, s, order, j): n for j, n in enumerate(drawn.tolist())})
                t += case.loads[s].lengths(g.module)[order]
        np.testing.assert_array_equal(numbers, want)
    assert len(set(found.values())) == (len(found) if draws else 1)
    assert (0 in found.values()) == (draws == "")


def test_numbers_are_even():
    drawn = derive_seeds("any", 20_000).astype(np.uint64)
    bits = (drawn[:, None] >> np.arange(1, 32, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 20_000**0.5
    assert len(derive_seeds("any", 0)) == 0
    np.testing.assert_array_equal(derive_seeds("any", 1), drawn[:1])
    assert (derive_seeds("other", 100) != drawn[:100]).all()


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_of_processes_make_the_whole(seed):
    """Each process decodes its own samples only; their arrays and counts add up."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, group_size=2, ranks=dict.fromkeys(BLOCKS, 3), smaller=0.2)
    # Rank 1 of c lies on both processes; a is the first's alone but for its last rank.
    fills = [{"a": {0, 1}, "b": {0}, "c": {0, 1}, "d": ()},
             {"a": {2}, "b": {1, 2}, "c": {1, 2}, "d": {0, 1, 2}}]  # fmt: skip
    counts = [fills[0], {**fills[1], "c": {2}}]
    processes, parts = [*map(LocalRanks, fills, counts)], []
    for ranks in processes:
        own = local_samples(case.plan.layout, case.schedule, case.loads, ranks)
        parts.append(packed_of(case, samples={s: case.samples[s] for s in own}, ranks=ranks))
    for g, whole, *by_process in zip(case.schedule.groups, packed_of(case), *parts, strict=True):
        total = np.zeros(2)
        for ranks, part in zip(processes, by_process, strict=True):
            total += part.used_tokens, part.loss_weights.sum(dtype=float)
            mine = [r * g.shape.rows + k for r in ranks.filled[g.module]
                    for k in range(g.shape.rows)]  # fmt: skip
            for name, array in part.fields.items():
                np.testing.assert_array_equal(array[:, mine], whole.fields[name][:, mine])
            for feeder, arrays in part.gathers.items():
                for array, other in zip(arrays, whole.gathers[feeder], strict=True):
                    np.testing.assert_array_equal(array[:, mine], other[:, mine])
        assert total == pytest.approx((whole.used_tokens, whole.loss_weights.sum()))


@pytest.mark.parametrize("seed", range(5))
def test_own_samples_are_those_of_the_ranks(seed):
    case = random_case(np.random.default_rng(seed), ranks=dict.fromkeys(BLOCKS, 3))
    nobody = dict.fromkeys(BLOCKS, ())
    arguments = case.plan.layout, case.schedule, case.loads
    assert local_samples(*arguments, LocalRanks(nobody, nobody)) == []
    for module in BLOCKS:
        own = local_samples(*arguments, LocalRanks({**nobody, module: {1}}, nobody))
        first = first_piece_numbers(case.loads, module)
        assert own == sorted({
            s for g in case.schedule.groups if g.module == module for mb in nested(case, g)
            for row in mb[1] for p in row
            for s in range(len(case.loads)) if first[s] <= p < first[s + 1]
        })  # fmt: skip


def pack_row(row, tokens, samples, loads, module="c"):
    """A group of one row of a module."""
    case = random_case(np.random.default_rng(0), ranks=dict.fromkeys(BLOCKS, 1))
    schedule = Schedule(0, (group_of_rows(module, Shape(1, tokens), (((row,),),)),))
    return pack_groups(case.plan.layout, schedule, samples, loads, model=case.model)[0]


@pytest.mark.parametrize("row, loads", [((), []), ((0,), [Load({"c": (3,)})])])
def test_an_empty_row_and_a_sample_that_nothing_replaces(row, loads):
    packed = pack_row(row, 5, [EMPTY] * len(loads), loads)
    assert packed.fields["token"].shape == (1, 1, 5)
    assert (packed.gathers, packed.used_tokens, packed.loss_weights.any()) == ({}, 0, False)
    assert not any(a.any() for a in packed.fields.values())


def test_positions_of_samples_stay_and_a_sample_without_a_field_is_named():
    load = Load({"c": (3,)})
    fields = {"token": np.arange(3), "positions": np.array([4, 9, 2])}
    with pytest.raises(ValueError, match="no token for module 'c'"):
        pack_row((0,), 5, [Sample({}, {}, load)], [load])
    packed = pack_row((0,), 5, [Sample({"c": fields}, {}, load)], [load])
    assert packed.fields["positions"].tolist() == [[[4, 9, 2, 0, 0]]]


@pytest.mark.parametrize(
    "make, why",
    [(lambda: FeatureGather(np.zeros((3, 2), np.int32)), "need weights"),
     (lambda: FeatureGather(np.zeros((3, 2), np.int32), np.zeros((3, 1))), "weights"),
     (lambda: Sample({"a": {"x": np.zeros(2)}}, {}, Load({"a": (5,)})), "2 values for 1 pieces"),
     (lambda: Sample({}, {("a", "c"): FeatureGather(np.zeros((3, 1), int))}, Load({"c": (4,)})),
      "3 for 4 tokens")],
)  # fmt: skip
def test_wrong_samples_cannot_be_made(make, why):
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.parametrize("merged", [1, 2, 4, 9])
def test_no_feature_is_lost_where_a_row_ends_with_too_few_tokens_for_one(merged):
    for tokens in range(merged, 90):
        per_row = tokens // merged
        lengths = merged * np.arange(per_row + 1)
        assert (counted(lengths, per_row, tokens) == np.arange(per_row + 1)).all()
    per_token = 3  # of a module that gives more features than it has tokens
    assert (counted(np.arange(5), 4 * per_token, 4) == per_token * np.arange(5)).all()
