"""Packing against a naive packer, from the definitions, on random graphs of modules."""

from collections import Counter
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax import records
from dflop_jax.data import pack_groups
from dflop_jax.data.gathers import count_features as counted
from dflop_jax.data.packing import LocalRanks, derive_seeds, local_samples
from dflop_jax.data.sample import EMPTY_SAMPLE, FeatureGather, Sample
from dflop_jax.records import Edge, Group, Load, Schedule, Shape
from tests.rows import group_of_rows, rows_of


@dataclass(frozen=True)
class Block:
    """A module that gives a feature for every `merge` tokens, `alone`: one piece a row."""

    merge: int = 1
    alone: int = 0
    loss: bool = False
    fed: bool = True
    tied: bool = False

    @property
    def inputs(self):
        if self.alone:
            return {"entry": ("picture", "size"), "layers": (), "exit": (), "adapter": ("seeds",)}
        entry, losses = ("token", *["in"] * self.fed), ("weights",) * self.loss
        layers = ("segment_ids", "positions")
        return {"entry": entry, "layers": layers, "exit": losses, "adapter": ("seeds",)}

    def field_spec(self, name, rows, tokens):
        dims = {"picture": (rows, 2, 3), "size": (rows,), "in": (rows, tokens, 7)}
        dims |= {"seeds": (rows,)} if self.alone else {}
        kind = {"picture": "uint8", "weights": "float32", "in": "float32", "seeds": "uint32"}
        return jax.ShapeDtypeStruct(dims.get(name, (rows, tokens)), kind.get(name, "int32"))

    def init(self, part, key):
        return {"w": jnp.zeros(())}

    def entry(self, params, batch):
        if self.alone:
            return jnp.zeros((len(batch["size"]), self.alone, 7)) + params["w"]
        own = batch["token"][..., None].astype(jnp.float32)
        return (batch["in"] if self.fed else own) + params["w"]

    def exit(self, params, x, batch, entry):
        return {"loss_sum": x.sum()} if self.loss else x[:, :: self.merge]

    def tap(self, name, params, x, batch):
        return x


# a and b feed c; a and c (its hidden states) feed d. a takes one piece of 5 tokens a row and gives
# 3 features, b packs pieces of even length and gives a feature for two tokens.
BLOCKS = {"a": Block(2, alone=5), "b": Block(2, fed=False), "c": Block(), "d": Block(loss=True)}
EDGES = (
    Edge("a", "c", "in"),
    Edge("b", "c", "in", sources=3),
    Edge("a", "d", "in", sources=2),
    Edge("c", "d", "in", tap="hidden", leaves=1),
)


def random_case(rng, *, group_size=1, ranks=None, smaller=0.0):
    """A random batch in random groups: every d group is fed by up to two c groups, each of these by
    up to two a and b groups; some samples lack modules, a share is smaller than its load."""
    ranks = ranks or {m: int(rng.integers(1, 4)) for m in BLOCKS}
    loads = [Load({m: random_lengths(rng, m) for m in BLOCKS}) for _ in range(rng.integers(1, 12))]
    trees = [[rng.integers(1, 3, 2) for _ in range(rng.integers(1, 3))]
             for _ in range(rng.integers(1, 3))]  # fmt: skip
    chosen = []  # of every sample: (d group, c group, microbatch)
    for _ in loads:
        d = int(rng.integers(len(trees)))
        chosen.append((d, int(rng.integers(len(trees[d]))), int(rng.integers(group_size))))
    groups: list[Group] = []
    n_before = sum(len(t) + int(np.sum(t)) for t in trees)
    place_d = [n_before + d for d in range(len(trees))]
    for d, tree in enumerate(trees):
        for c, (n_a, n_b) in enumerate(tree):
            inside = [s for s, (x, y, _) in enumerate(chosen) if (x, y) == (d, c)]
            place_c = len(groups) + n_a + n_b
            for m, n, feeds in (("a", n_a, (place_c, place_d[d])), ("b", n_b, (place_c,))):
                groups += deal(rng, m, n, inside, loads, chosen, group_size, ranks[m], feeds)
            groups += deal(rng, "c", 1, inside, loads, chosen, group_size, ranks["c"],
                           (place_d[d],))  # fmt: skip
    for d in range(len(trees)):
        inside = [s for s, (x, _, _) in enumerate(chosen) if x == d]
        groups += deal(rng, "d", 1, inside, loads, chosen, group_size, ranks["d"], ())
    shapes = {m: next(g.shape for g in groups if g.module == m) for m in BLOCKS}
    layout = records.Layout(
        tuple(records.SubmeshPlan(m, 0, 1, ranks[m], 1) for m in BLOCKS),
        tuple(records.SegmentPlan(m, m, 0, 1, m, True, True) for m in BLOCKS),
        (records.Bucket.from_shapes(shapes),), edges=EDGES, group_size=group_size,
    )  # fmt: skip
    edges = tuple(asdict(e) for e in EDGES)
    model = SimpleNamespace(modules=BLOCKS, piece_tokens={"a": 5}, edges=edges)
    real = [less(rng, load) if rng.random() < smaller else load for load in loads]
    samples = [random_sample(rng, s, load) for s, load in enumerate(real)]
    schedule = Schedule(0, tuple(groups))
    return SimpleNamespace(
        layout=layout, model=model, schedule=schedule, loads=loads, samples=samples
    )


def random_lengths(rng, module):
    n = int(rng.integers(0, 5 if module in "ab" else 3))
    if module == "a":
        return (5,) * n
    return tuple(int(x) * (2 if module == "b" else 1) for x in rng.integers(1, 6, n))


def less(rng, load):
    """A load that fits in another's places."""
    pieces = {}
    for m, lengths in load.pieces.items():
        lengths = lengths[: int(rng.integers(len(lengths) + 1))]
        step = {"a": 5, "b": 2}.get(m, 1)
        pieces[m] = tuple(int(rng.integers(1, n // step + 1)) * step for n in lengths)
    return Load(pieces)


def deal(rng, module, n_groups, inside, loads, chosen, group_size, ranks, feeds):
    """Groups that hold all pieces of these samples at random, in their microbatches."""
    first = records.first_piece_numbers(loads, module)
    mine = [(p, s) for s in inside for p in range(first[s], first[s + 1])]
    length = {p: loads[s].lengths(module)[p - first[s]] for p, s in mine}
    n_rows = max(1, len(mine)) if module == "a" else int(rng.integers(1, 4))
    slots = rng.permutation(ranks * n_rows).tolist()  # one piece a row, of a
    entries, made = [[] for _ in range(n_groups)], []
    for k, (p, s) in enumerate(mine):
        slot = slots[k] if module == "a" else int(rng.integers(ranks * n_rows))
        place = (chosen[s][2], slot // n_rows, slot % n_rows)
        entries[int(rng.integers(n_groups))].append((p, *place))
    for of_group in entries:
        used = Counter()
        for p, *row in of_group:
            used[tuple(row)] += length[p]
        most = max(used.values(), default=0)
        tokens = 5 if module == "a" else max(2, most + most % 2 + 2 * int(rng.integers(2)))
        columns = np.array(sorted(of_group, key=lambda e: e[1:]), np.int64).reshape(-1, 4).T
        places = records.PackedPieces(columns)
        made.append(Group(module, Shape(n_rows, tokens), feeds, (), places, group_size))
    return made


def random_sample(rng, s, load):
    """A sample whose values say whose they are: sample * 1000 + token or piece."""
    fields = {}
    for m, lengths in load.pieces.items():
        if not lengths:
            continue
        names = np.arange(sum(lengths)) + 1000 * s + 1
        if m == "a":
            pieces = np.arange(len(lengths))
            fields[m] = {"picture": np.broadcast_to((pieces + s)[:, None, None],
                                                    (len(pieces), 2, 3)).astype(np.uint8),
                         "size": 1000 * s + pieces + 1}  # fmt: skip
        else:
            fields[m] = {"token": names, "weights": rng.random(len(names)).astype(np.float32),
                         "unread": names}  # fmt: skip
    places = {}
    for e in EDGES:
        n, features = load.tokens(e.target), features_of(e.source, load.tokens(e.source))
        if n and features:
            index = rng.integers(-1, features, (n, e.sources)).astype(np.int32)
            weight = rng.random(index.shape).astype(np.float32) * (index >= 0)
            places[e.source, e.target] = FeatureGather(index, weight if e.sources > 1 else None)
    return Sample(fields, places, load)


def features_of(module, tokens):
    return tokens * 3 // 5 if module == "a" else tokens // BLOCKS[module].merge


# ---- the naive packer ----


def placed(case, group):
    """(row, first column, segment, sample, order, its own tokens) of every piece of a group."""
    loads = enumerate(case.loads)
    pieces = [(s, k) for s, load in loads for k in range(len(load.lengths(group.module)))]
    for m, ranks in enumerate(rows_of(group, case.layout.data_ranks(group.module))):
        for r, rank in enumerate(ranks):
            for k, row in enumerate(rank):
                t = 0
                for segment, piece in enumerate(row, 1):
                    s, order = pieces[piece]
                    ends = np.cumsum((0, *case.samples[s].load.lengths(group.module))).tolist()
                    own = slice(*ends[order : order + 2]) if order + 1 < len(ends) else slice(0, 0)
                    yield (m, r * group.shape.rows + k), t, segment, s, order, own
                    t += case.loads[s].lengths(group.module)[order]


def naive_fields(case, g, draws):
    """Every field of a group, and its tokens."""
    rows = (g.microbatches, case.layout.data_ranks(g.module) * g.shape.rows)
    names = {n for of_part in BLOCKS[g.module].inputs.values() for n in of_part} - {"in"}
    specs = {name: BLOCKS[g.module].field_spec(name, 1, g.shape.tokens) for name in names}
    made = {name: np.zeros((*rows, *spec.shape[1:]), spec.dtype) for name, spec in specs.items()}
    used = 0
    for at, t, segment, s, order, own in placed(case, g):
        n, fields = own.stop - own.start, case.samples[s].fields.get(g.module, {})
        seeds = derive_seeds(f"{draws}/{g.module}/{s}/{order}", n) * (draws != "")
        used += n
        for name in names if n else ():
            if g.module == "a":
                made[name][at] = seeds[0] if name == "seeds" else fields[name][order]
            else:
                values = {"segment_ids": [segment] * n, "positions": range(n), "seeds": seeds}
                made[name][at][t : t + n] = values[name] if name in values else fields[name][own]
    return made, used


def locate(case, source):
    """(sample, its feature) -> (feeding group, flat feature) of a whole module."""
    found = {}
    for i, g in enumerate(case.schedule.groups):
        per_row = features_of(source, g.shape.tokens)
        for (_, r), t, _, s, _, own in placed(case, g) if g.module == source else ():
            begin, inside = features_of(source, own.start), t * per_row // g.shape.tokens
            for j in range(features_of(source, own.stop - own.start)):
                found[s, begin + j] = (i, r * per_row + inside + j)
    return found


def check_places(case, group, packed):
    """Every token names the features that its sample names, in one feeding group each."""
    g = case.schedule.groups[group]
    for edge in (e for e in EDGES if e.target == g.module):
        found, feeders = locate(case, edge.source), case.schedule.feeders(group, edge.source)
        n_rows = case.layout.data_ranks(g.module) * g.shape.rows
        shape = (g.microbatches, n_rows, g.shape.tokens, edge.sources)
        want = {f: (np.full(shape, -1), np.zeros(shape, np.float32)) for f in feeders}
        for at, t, _, s, _, own in placed(case, g):
            joins = case.samples[s].gathers.get((edge.source, edge.target))
            for (j, c), feature in np.ndenumerate(joins.index[own]) if joins else ():
                if feature >= 0:
                    feeder, flat = found[s, int(feature)]
                    want[feeder][0][at][t + j, c] = flat
                    if edge.sources > 1:
                        want[feeder][1][at][t + j, c] = joins.weight[own][j, c]
        for f in feeders:
            assert len(packed.gathers[f]) == 1 + (edge.sources > 1)
            for got, expected in zip(packed.gathers[f], want[f]):
                np.testing.assert_array_equal(got, expected)
            check_reads(case, case.schedule.groups[f], g, packed, f)


def check_reads(case, source, target, packed, feeder):
    low, high = (case.layout.data_ranks(g.module) for g in (source, target))
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


def packed_of(case, *, samples=None, **options):
    layout, samples = case.layout, samples or case.samples
    return pack_groups(layout, case.schedule, samples, case.loads, model=case.model, **options)


@pytest.mark.parametrize("smaller", [0.0, 0.5])
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_every_token_and_feature_is_where_it_belongs(seed, group_size, smaller):
    rng = np.random.default_rng([seed, group_size])
    case = random_case(rng, group_size=group_size, smaller=smaller)
    draws = f"{seed}/0" if seed else ""
    every = packed_of(case, draws=draws)
    for i, (g, packed) in enumerate(zip(case.schedule.groups, every, strict=True)):
        fields, used = naive_fields(case, g, draws)
        assert packed.fields.keys() == fields.keys()
        for name, array in fields.items():
            np.testing.assert_array_equal(packed.fields[name], array)
            assert packed.fields[name].dtype == array.dtype
        assert packed.used_tokens == used
        weights = fields.get("weights", np.zeros(1))
        assert packed.loss_weights.sum(dtype=float) == pytest.approx(weights.sum(dtype=float))
        sources = case.layout.sources(g.module)
        assert set(packed.gathers) == {f for m in sources for f in case.schedule.feeders(i, m)}
        check_places(case, i, packed)


def test_numbers_are_even():
    drawn = derive_seeds("any", 20_000).astype(np.uint64)
    bits = (drawn[:, None] >> np.arange(1, 32, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 20_000**0.5
    assert len(derive_seeds("any", 0)) == 0
    np.testing.assert_array_equal(derive_seeds("any", 1), drawn[:1])
    assert (derive_seeds("other", 100) != drawn[:100]).all()


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_of_processes_make_the_whole(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng, group_size=2, ranks=dict.fromkeys(BLOCKS, 3), smaller=0.2)
    # Rank 1 of c lies on both processes; a is the first's alone but for its last rank.
    fills = [{"a": {0, 1}, "b": {0}, "c": {0, 1}, "d": ()},
             {"a": {2}, "b": {1, 2}, "c": {1, 2}, "d": {0, 1, 2}}]  # fmt: skip
    counts = [fills[0], {**fills[1], "c": {2}}]
    processes, parts = [*map(LocalRanks, fills, counts)], []
    for ranks in processes:
        own = local_samples(case.layout, case.schedule, case.loads, ranks)
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


def pack_row(row, tokens, samples, loads, module="c"):
    """A group of one row of a module."""
    case = random_case(np.random.default_rng(0), ranks=dict.fromkeys(BLOCKS, 1))
    schedule = Schedule(0, (group_of_rows(module, Shape(1, tokens), (((row,),),)),))
    return pack_groups(case.layout, schedule, samples, loads, model=case.model)[0]


@pytest.mark.parametrize("row, loads", [((), []), ((0,), [Load({"c": (3,)})])])
def test_an_empty_row_and_a_sample_that_nothing_replaces(row, loads):
    packed = pack_row(row, 5, [EMPTY_SAMPLE] * len(loads), loads)
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
      "3 rows for 4 tokens")],
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
