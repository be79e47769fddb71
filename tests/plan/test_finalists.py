"""Which candidates are looked at closely after a glance at all, and what is made of them."""

from types import SimpleNamespace

import pytest

from dflop_jax.plan import finalists
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.finalist import Finalist
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.plan.volume import volume_of
from dflop_jax.records import Load

from ..plans import TILE_TOKENS, bucket, chain, load

ORCH, DFLOP, DIP = "orch", "dflop", "dip"


def looked_at(glances, n, known=()):
    """Indices of the candidates (policy, seconds at a glance) that are evaluated, in order, beside
    those that are `known`; each is finished."""
    plans = [SimpleNamespace(policy=p, seconds=s, at=i) for i, (p, s) in enumerate(glances)]
    candidate = SimpleNamespace(bound_s=0.0)
    evaluator = SimpleNamespace(
        glance_s=lambda plan: plan.seconds,
        evaluate=lambda plan, bound_s: plan,
        judged_s=lambda plan: plan.seconds,
        rules=SimpleNamespace(spec=SimpleNamespace(memory_bytes=0)),
    )

    def finish(plan):
        return SimpleNamespace(**vars(plan), finished=True)

    tried = [Finalist(p, candidate, 1) for p in plans]
    before = [Finalist(SimpleNamespace(policy=p), glance_s=s, seconds=s) for p, s in known]
    judged = finalists._judged(evaluator, tried, n, finish, before)
    assert all(j.plan.finished and j.of is candidate for j in judged)
    return [j.plan.at for j in judged]


@pytest.mark.parametrize(
    "glances, n, expected",
    [
        ([], 3, []),
        ([(ORCH, 1.0)], 0, [0]),  # the fastest always
        ([(ORCH, 2.0), (ORCH, 1.0), (ORCH, 3.0)], 2, [1, 0]),  # as many as asked for, in order
        ([(ORCH, 1.0), (ORCH, 1.04), (ORCH, 1.06)], 1, [0, 1]),  # and all that are close
        ([(ORCH, 1.0), (DIP, 1.14), (DIP, 1.145)], 1, [0, 1]),  # another policy's first
        ([(ORCH, 1.0), (DIP, 1.16)], 1, [0]),  # unless it is far behind
        ([(ORCH, 1.0), (DIP, 1.1), (DIP, 1.12), (ORCH, 1.2), (ORCH, 1.3)], 2, [0, 1, 3]),
        ([(ORCH, 1.0), (DIP, 1.2)], 2, [0]),  # which takes no place of the fastest's policy
        ([(ORCH, 1.0), (DFLOP, 1.1), (DIP, 1.12), (ORCH, 1.1)], 1, [0, 1, 2]),
    ],
)  # fmt: skip
def test_the_first_the_close_and_the_first_of_other_policies(glances, n, expected):
    assert looked_at(glances, n) == expected


def test_what_is_known_is_not_looked_at_again_nor_what_is_far_behind_it():
    known = [(ORCH, 1.0)]
    assert looked_at([(ORCH, 1.06), (DIP, 1.16)], 1, known) == []
    assert looked_at([(ORCH, 1.04), (DIP, 1.14), (ORCH, 0.9)], 1, known) == [2]
    assert looked_at([(ORCH, 1.04), (DIP, 1.14)], 1, known) == [0, 1]


def shortened(plan, loads, batch_tokens=(0,)):
    """The plans with shorter rows that are made of a plan for these samples, in batches of so many
    tokens."""
    costs = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": TILE_TOKENS}))
    volumes = {"llm": volume_of("llm", loads, [loads], len(loads), counts_pieces=False)}
    rules = Rules(costs, volumes, SearchSpec(1, len(loads)))

    def n_groups(layout, batch):
        (one,) = layout.buckets
        return max(1, -(-batch_tokens[batch] // one.shape("llm").size))

    evaluator = SimpleNamespace(rules=rules, loads=loads, batches=batch_tokens, n_groups=n_groups)
    return [p.layout.buckets for p in finalists._with_shorter_rows(plan, evaluator)]


def with_buckets(*buckets):
    return chain(2, vision=1).with_layout(buckets=buckets)


def test_packed_rows_are_tried_as_short_as_the_longest_piece():
    plan = with_buckets(bucket(8, 384, 4), bucket(4, 384, 2), bucket(0, 256))
    found = shortened(plan, [load(2, 337), load(0, 40)])
    assert found == [(bucket(8, 352, 4), bucket(4, 352, 2), bucket(0, 256))]
    assert shortened(plan, [load(1, 353)]) == []  # as short as can be
    assert shortened(with_buckets(bucket(4, 32)), [load(0, 1)]) == []


@pytest.mark.parametrize(
    "batch_tokens, tried", [((1400, 1400), True), ((1400, 1410), False), ((14_000, 15_000), True)]
)
def test_rows_stay_where_batches_need_many_more_groups(batch_tokens, tried):
    """Four rows of 384 tokens hold 1,536, of 352 they hold 1,408."""
    found = shortened(with_buckets(bucket(8, 384, 4)), [load(2, 337)], batch_tokens)
    assert found == [(bucket(8, 352, 4),)] * tried


def test_rows_stay_where_a_sample_needs_their_length():
    """Five pictures of 40 tokens take two rows of 128, three of which 64 are one too few."""
    plan = with_buckets(bucket(8, 128, 2))
    loads = [Load({"vision": (TILE_TOKENS,), "llm": (40,) * 5})]
    assert shortened(plan, loads) == []
    assert shortened(plan, [Load({"llm": (40,) * 2})]) == [(bucket(8, 64, 2),)]
