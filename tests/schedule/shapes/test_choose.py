"""Bucket choice: the MILP against exhaustive choice, the limits it promises, the baseline's."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import Bucket, SampleShape
from dflop_jax.schedule import Capacity, arrival_buckets, choose_buckets, evaluate_buckets
from dflop_jax.schedule.cover import demand
from dflop_jax.schedule.shapes.choose import _EFFORTS, _largest
from dflop_jax.schedule.shapes.milp import _GAP, _SLACK, group_price, solve_choice
from dflop_jax.schedule.shapes.search import Sizes, chains
from tests.schedule.conftest import make_batch


def linear_seconds(bucket):
    return (0.01 * bucket.tiles, 0.002 * bucket.tokens * bucket.rows + 0.02)


def quadratic_seconds(bucket):
    """Attention over a row is dear."""
    return (0.01 * bucket.tiles, 1e-5 * bucket.rows * bucket.tokens**2 + 0.01)


def exhaustive_objective(candidates, batches, capacity, k, seconds, must_hold):
    """The MILP's objective by trying every choice and every count vector."""
    best = np.inf
    for size in range(1, k + 1):
        for chosen in itertools.combinations(candidates, size):
            if not all(any(capacity.holds(b, s) for b in chosen) for s in must_hold):
                continue
            total = max(sum(seconds(b)) - max(seconds(b)) for b in chosen)
            for batch in batches:
                total += cheapest_cover(candidates, chosen, batch, capacity, seconds) / len(batches)
            best = min(best, total)
    return best


def cheapest_cover(candidates, chosen, batch, capacity, seconds):
    wanted = demand(batch, candidates, capacity)
    columns = [candidates.index(b) for b in chosen]
    price = [group_price(seconds(b), capacity.group_size) for b in chosen]
    counts = np.array(list(itertools.product(range(9), repeat=len(chosen))))
    met = (counts @ wanted.room_DC[:, columns].T >= _SLACK * wanted.need_D - 1e-6).all(axis=1)
    return (counts[met] @ price).min() if met.any() else np.inf


@pytest.mark.parametrize("seed", range(4))
def test_milp_equals_exhaustive_choice(seed):
    rng = np.random.default_rng(seed)
    batches = [make_batch(rng, 12, most_tiles=6, most_tokens=60) for _ in range(2)]
    front = _largest([s for batch in batches for s in batch], ("vision", "llm"))
    capacity = Capacity(1, 2)
    candidates = [Bucket(t, k) for t in (0, 6, 12) for k in (64, 128)]
    chosen = solve_choice(
        candidates,
        batches,
        capacity,
        2,
        linear_seconds,
        must_hold=front,
        max_nodes=100_000,
        time_limit_s=60.0,
    )
    assert len(chosen) <= 2
    total = max(sum(linear_seconds(b)) - max(linear_seconds(b)) for b in chosen)
    for batch in batches:
        total += cheapest_cover(candidates, chosen, batch, capacity, linear_seconds) / 2
    best = exhaustive_objective(candidates, batches, capacity, 2, linear_seconds, front)
    assert best * (1 - 1e-9) <= total <= best * (1 + _GAP)


def test_largest_is_the_pareto_front():
    rng = np.random.default_rng(0)
    shapes = [replace(s, windows=int(rng.integers(4))) for s in make_batch(rng, 50)]
    for modules in (("vision", "llm"), ("vision", "audio", "llm"), ("llm",)):
        front = _largest(shapes, modules)
        for s in shapes:
            assert any(all(f.load(m) >= s.load(m) for m in modules) for f in front)
        for a, b in itertools.permutations(front, 2):
            assert any(a.load(m) > b.load(m) for m in modules)


@pytest.fixture(scope="module")
def shapes():
    return make_batch(np.random.default_rng(0), 600)


def test_choice_is_within_limits_and_pads_little(shapes):
    choice = choose_buckets(
        shapes,
        global_batch=256,
        vision_ranks=2,
        llm_ranks=2,
        token_multiple=32,
        max_tiles=90,
        max_tokens=1024,
    )
    assert 1 <= len(choice.buckets) <= 4
    assert all(b.tokens % 32 == 0 and b.tokens <= 1024 for b in choice.buckets)
    assert all(b.tiles <= 90 and b.rows == 1 for b in choice.buckets)
    capacity = Capacity(2, 2)
    for s in shapes:
        assert any(capacity.holds(b, s) for b in choice.buckets)
    assert choice.padding["llm"] <= 0.03
    assert choice.padding["vision"] <= 0.05


def test_more_buckets_pad_less_than_one(shapes):
    """One bucket of the chosen set's largest capacities, on the same batches."""
    capacity = Capacity(2, 2)
    batches = [shapes[:256], shapes[256:512]]
    fine = tuple(Bucket(t, k) for t, k in ((48, 512), (48, 256), (24, 256), (12, 128)))
    one = (Bucket(48, 512),)
    assert (
        evaluate_buckets(fine, batches, capacity, linear_seconds).expected_s
        < evaluate_buckets(one, batches, capacity, linear_seconds).expected_s
    )


def test_padding_is_the_unused_share():
    shapes = [SampleShape(3, 0, 60)] * 2
    result = evaluate_buckets((Bucket(4, 100),), [shapes], Capacity(1, 1), linear_seconds)
    assert result.padding == pytest.approx({"llm": 0.4, "vision": 0.25})


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_a_module_absent_and_one_sample(effort):
    text = [SampleShape(0, 70, 70)]
    choice = choose_buckets(text, global_batch=4, vision_ranks=0, token_multiple=32, effort=effort)
    assert all(b.tiles == 0 for b in choice.buckets)
    assert max(b.tokens for b in choice.buckets) >= 96


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_the_same_arguments_give_the_same_buckets(shapes, effort, monkeypatch):
    """Work is counted, not timed; another seed draws other batches."""
    less = {name: replace(work, budget=min(work.budget, 50)) for name, work in _EFFORTS.items()}
    monkeypatch.setattr("dflop_jax.schedule.shapes.choose._EFFORTS", less)
    options = {"global_batch": 16, "llm_ranks": 2, "token_multiple": 32, "effort": effort}
    first, second = (choose_buckets(shapes, **options) for _ in range(2))
    assert first == second
    if effort == "quick":
        assert choose_buckets(shapes, **options, seed=1).expected_s != first.expected_s


def test_quick_is_close_to_full(shapes):
    """Both on batches that neither has seen."""
    rng = np.random.default_rng(9)
    batches = [[shapes[i] for i in rng.choice(len(shapes), 32)] for _ in range(8)]
    options = {"global_batch": 32, "vision_ranks": 2, "llm_ranks": 2, "token_multiple": 32}
    spent_s = {}
    for effort in ("quick", "full"):
        choice = choose_buckets(shapes, **options, seconds=linear_seconds, effort=effort)
        result = evaluate_buckets(choice.buckets, batches, Capacity(2, 2), linear_seconds)
        spent_s[effort] = result.expected_s
    assert spent_s["full"] <= spent_s["quick"] <= 1.15 * spent_s["full"]


@pytest.mark.parametrize("effort", ["quick", "full"])
@pytest.mark.parametrize("n_buckets", [1, 2])
def test_no_time_still_gives_buckets_that_hold_everything(shapes, n_buckets, effort):
    choice = choose_buckets(
        shapes, global_batch=16, n_buckets=n_buckets, effort=effort, time_limit_s=1e-3
    )
    assert 1 <= len(choice.buckets) <= n_buckets
    assert all(any(Capacity(1, 1).holds(b, s) for b in choice.buckets) for s in shapes)


def test_an_unknown_effort_is_refused(shapes):
    with pytest.raises(ValueError, match="effort='slow' is not one of quick, full"):
        choose_buckets(shapes, global_batch=8, effort="slow")


@pytest.mark.parametrize("most_tiles, most_tokens", [(None, None), (12, 256)])
def test_chains_keep_to_the_limits(most_tiles, most_tokens):
    most_items = {} if most_tiles is None else {"vision": most_tiles}
    batch, least = {"vision": 130.0}, {"vision": 12}
    sizes = Sizes(64, 4000.0, batch, 256, least, most_tokens, most_items, mean_tokens=60.0)
    starts = chains(sizes, 4, 8, quadratic_seconds)
    assert len(set(starts)) == len(starts) > 0
    assert any(b.rows > 1 for start in starts for b in start)
    for start in starts:
        assert 1 <= len(start) <= 4
        assert start[0].tiles >= 12
        assert start[0].tokens >= 256
        for b in start:
            assert b.tokens % 64 == 0
            assert b.rows * b.tokens <= (most_tokens or 10**9)
            assert b.tiles <= (most_tiles or 10**9)


def test_several_short_rows_where_long_ones_are_dear(shapes):
    def choose(seconds):
        return choose_buckets(
            shapes, global_batch=32, seconds=seconds, token_multiple=32, effort="quick"
        )

    dear, linear = choose(quadratic_seconds), choose(linear_seconds)
    assert any(b.rows > 1 for b in dear.buckets)
    assert all(b.rows == 1 for b in linear.buckets)
    rng = np.random.default_rng(7)
    batches = [[shapes[i] for i in rng.choice(len(shapes), 32)] for _ in range(3)]
    capacity = Capacity(1, 1)
    other = evaluate_buckets(linear.buckets, batches, capacity, quadratic_seconds)
    own = evaluate_buckets(dear.buckets, batches, capacity, quadratic_seconds)
    assert own.expected_s < other.expected_s


def test_sample_above_the_memory_limit_is_refused(shapes):
    with pytest.raises(ValueError, match="drop or truncate"):
        choose_buckets(shapes, global_batch=8, token_multiple=32, max_tokens=64)


def test_arrival_buckets_hold_the_largest_and_follow_quantiles(shapes):
    found = arrival_buckets(shapes, 3, n_buckets=3, data_ranks=2, token_multiple=32)
    assert 1 <= len(found) <= 3
    assert all(b.rows == 3 and b.tokens % 32 == 0 for b in found)
    assert found[0].tokens >= max(s.llm_tokens for s in shapes)
    assert found[0].tiles >= 3 * max(s.tiles for s in shapes)
    assert all(a.tokens >= b.tokens for a, b in itertools.pairwise(found))
    one = arrival_buckets([SampleShape(2, 5, 13)], 1, token_multiple=32)
    assert one == (Bucket(2, 32, 1),)
