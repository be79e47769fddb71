"""A made-up graph of modules trains: its gradients equal the plain computation under any layout."""

import functools

import jax
import numpy as np
import pytest

from dflop_jax.records import Schedule, Shape, first_piece_numbers, piece_tokens
from dflop_jax.runtime import segment
from tests.graphs.made_up import GRAINS, MadeUp, MadeUpData, plain_loss, scales_of
from tests.plans import graph_plan
from tests.rows import group_of_rows
from tests.runtime import plain
from tests.runtime.test_gradients import assert_norm, assert_trees_close, grads_of

MODEL = MadeUp()
SHAPES = {
    "sights": Shape(3, 64),
    "smells": Shape(16, GRAINS),
    "words": Shape(2, 192),
    "echoes": Shape(1, 40),
}
TWO = (1, 2, 1)  # data ranks
LAYOUTS = {  # see `graph_plan`
    "all apart": {
        "sights": [(1, 0), (3, 1)],
        "smells": [(2, 2, TWO)],
        "words": [(2, 4), (4, 5), (6, 6)],
        "echoes": [(2, 7)],
    },
    "two ranks each, shared": {
        "sights": [(3, 0, TWO)],
        "smells": [(2, 0)],
        "words": [(3, 2, TWO), (6, 4, TWO)],
        "echoes": [(2, 4, TWO)],
    },
    "one device": {m: [(module.n_layers, 0)] for m, module in MODEL.modules.items()},
}


def make_plan(layout, fan_in=1):
    divided = ("echoes",) if fan_in > 1 else ()
    return graph_plan(MODEL, LAYOUTS[layout], SHAPES, fan_in=fan_in, divided_readers=divided)


def dealt(plan, module, pieces, tokens):
    """Pieces into the rows of one group, first fit over ranks in turn."""
    shape, ranks = SHAPES[module], plan.layout.data_ranks(module)
    rows = [[] for _ in range(ranks * shape.rows)]
    for k, p in enumerate(pieces):
        turn = [(k + i) % len(rows) for i in range(len(rows))]
        place = next(r for r in turn if sum(tokens[q] for q in rows[r]) + tokens[p] <= shape.tokens)
        rows[place].append(int(p))
    every = tuple(map(tuple, rows))
    return tuple(every[r * shape.rows : (r + 1) * shape.rows] for r in range(ranks))


def make_schedule(plan, loads, n_groups, seed, fan_in=1):
    """Samples at random into groups of words; their pictures into `fan_in` groups that feed it, and
    what reads it into as many."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(loads))
    tokens = {m: piece_tokens(loads, m) for m in plan.layout.modules}
    first = {m: first_piece_numbers(loads, m) for m in plan.layout.modules}
    groups = []

    def pieces_of(module, members):
        return [p for s in members for p in range(first[module][s], first[module][s + 1])]

    for k in range(n_groups):
        members = order[k::n_groups].tolist()
        split = {m: [pieces_of(m, members)] for m in plan.layout.modules}
        for m in ("sights", "echoes"):
            split[m] = [split[m][0][i::fan_in] for i in range(fan_in)]
        # a group without a piece is not run, unless others read it
        parts = [(m, p) for m in ("sights", "smells") for p in split[m] if p]
        consumer = len(groups) + len(parts)
        for m, p in parts:
            groups.append(group_of_rows(m, SHAPES[m], (dealt(plan, m, p, tokens[m]),), (consumer,)))
        echoes = [p for p in split["echoes"] if p]
        feeds = tuple(consumer + 1 + i for i in range(len(echoes)))
        words = split["words"][0]
        groups.append(
            group_of_rows(
                "words", SHAPES["words"], (dealt(plan, "words", words, tokens["words"]),), feeds
            )
        )
        for part in echoes:
            rows = dealt(plan, "echoes", part, tokens["echoes"])
            groups.append(group_of_rows("echoes", SHAPES["echoes"], (rows,)))
    return Schedule(0, tuple(groups))


@functools.cache
def oracle(n=8):
    """(samples, parameters, scales, loss, gradients), one sample at a time on one device."""
    data = MadeUpData(n, kinds=5)  # few, so that the oracle compiles few programs
    samples = [data.sample(i) for i in range(n)]
    scales = scales_of(samples)
    params = plain.fresh_params(MODEL, make_plan("one device"))
    every_args = []
    for s in samples:
        places = {
            edge: (p.index, np.ones(p.index.shape, np.float32) if p.weight is None else p.weight)
            for edge, p in s.gathers.items()
        }
        every_args.append((tuple(s.load.pieces.items()), s.fields, places, scales))
    value_and_grad = jax.jit(jax.value_and_grad(plain_loss), static_argnums=1)
    with jax.numpy_rank_promotion("allow"):
        return samples, params, scales, *plain.summed(value_and_grad, params, every_args)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "layout, fan_in, n_groups, unrolled",
    [("one device", 1, 2, 0), ("all apart", 1, 3, 8), ("all apart", 3, 2, 0),
     ("two ranks each, shared", 2, 2, 0)],
)  # fmt: skip
def test_step_equals_plain_computation(layout, fan_in, n_groups, unrolled, monkeypatch):
    monkeypatch.setattr(segment, "max_unrolled_layers", lambda chip: unrolled)
    samples, params, scales, want_loss, want = oracle()
    plan = make_plan(layout, fan_in)
    schedule = make_schedule(plan, [s.load for s in samples], n_groups, fan_in, fan_in=fan_in)
    fed = max(len(schedule.fed_by(i, "sights")) for i in range(len(schedule.groups)))
    assert fed == fan_in
    read = max(sum(schedule.groups[f].module == "echoes" for f in g.feeds) for g in schedule.groups)
    assert read == fan_in
    loss, grads, start, result = grads_of(
        MODEL, plan, samples, schedule, scales=scales, clip_norm=0.0, evaluates=True
    )
    jax.tree.map(np.testing.assert_array_equal, start, params)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_norm(result, want)  # in which the tied parameter counts once
    assert all(np.abs(w).max() > 0 for w in jax.tree.leaves(want))
    assert_trees_close(grads, want)
