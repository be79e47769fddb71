"""Random graphs of modules with schedules and samples, for the packer and whoever needs them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.data.sample import FeatureGather, Sample
from dflop_jax.records import (
    Bucket,
    Edge,
    Group,
    Layout,
    Load,
    Plan,
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    first_piece_numbers,
)
from tests.rows import group_of_rows


@dataclass(frozen=True)
class Block:
    """A module that gives a feature for every `merge` tokens, `alone` (one piece a row) or not."""

    merge: int = 1
    alone: int = 0
    loss: bool = False
    fed: bool = True
    tied: bool = False

    @property
    def inputs(self):
        if self.alone:
            return {"entry": ("picture", "size"), "layers": (), "exit": ()}
        layers = ("segment_ids", "positions")
        return {"entry": ("token", *(("in",) if self.fed else ())), "layers": layers,
                "exit": ("weights",) if self.loss else ()}  # fmt: skip

    def field_spec(self, name, rows, tokens):
        dims = {"picture": (rows, 2, 3), "size": (rows,), "in": (rows, tokens, 7)}
        kind = {"picture": jnp.uint8, "weights": jnp.float32, "in": jnp.float32}
        return jax.ShapeDtypeStruct(dims.get(name, (rows, tokens)), kind.get(name, jnp.int32))

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
        assert params is None
        return x


@dataclass
class Case:
    """A scheduled batch: what `pack_groups` takes."""

    plan: Plan
    model: SimpleNamespace
    schedule: Schedule
    loads: list[Load]
    samples: list[Sample] = field(default_factory=list)


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
    layout = Layout(
        tuple(SubmeshPlan(m, 0, 1, ranks[m], 1) for m in BLOCKS),
        tuple(SegmentPlan(m, m, 0, 1, m, True, True) for m in BLOCKS),
        (Bucket.from_shapes(shapes),), edges=EDGES, group_size=group_size,
    )  # fmt: skip
    plan = Plan("test", layout)
    edges = tuple(asdict(e) for e in EDGES)
    model = SimpleNamespace(modules=BLOCKS, piece_tokens={"a": 5}, edges=edges)
    case = Case(plan, model, Schedule(0, tuple(groups)), loads)
    for s, load in enumerate(loads):
        real = less(rng, load) if rng.random() < smaller else load
        case.samples.append(random_sample(rng, s, real))
    return case


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
    first = first_piece_numbers(loads, module)
    n_rows = int(rng.integers(1, 4))
    mine = [(p, s) for s in inside for p in range(first[s], first[s + 1])]
    rng.shuffle(mine)
    rows = [[[[[] for _ in range(n_rows)] for _ in range(ranks)] for _ in range(group_size)]
            for _ in range(n_groups)]  # fmt: skip
    for p, s in mine:
        at = rows[int(rng.integers(n_groups))][chosen[s][2]]
        if module != "a":
            at[int(rng.integers(ranks))][int(rng.integers(n_rows))].append(int(p))
            continue
        free = [row for rank in at for row in rank if not row]
        if not free:  # every microbatch of every group has as many rows
            for group in rows:
                for microbatch in group:
                    for rank in microbatch:
                        rank.append([])
            free = [at[-1][-1]]
        free[int(rng.integers(len(free)))].append(int(p))
    size = lambda row: sum(loads[s].lengths(module)[p - first[s]] for p in row  # noqa: E731
                           for s in inside if first[s] <= p < first[s + 1])  # fmt: skip
    made = []
    for group in rows:
        most = max(size(row) for mb in group for rank in mb for row in rank)
        tokens = 5 if module == "a" else max(2, most + most % 2 + 2 * int(rng.integers(2)))
        n = max(len(rank) for mb in group for rank in mb)
        lists = tuple(tuple(tuple(tuple(row) for row in rank) for rank in mb) for mb in group)
        made.append(group_of_rows(module, Shape(n, tokens), lists, feeds))
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
        n, features = load.tokens(e.target), n_features(load, e.source)
        if n and features:
            index = rng.integers(-1, features, (n, e.sources)).astype(np.int32)
            weight = rng.random(index.shape).astype(np.float32) * (index >= 0)
            places[e.source, e.target] = FeatureGather(index, weight if e.sources > 1 else None)
    return Sample(fields, places, load)


def n_features(load, module):
    """Features that a sample's pieces of a module give."""
    if module == "a":
        return 3 * len(load.lengths("a"))
    return sum(load.lengths(module)) // (2 if module == "b" else 1)
