"""What is made of candidates before they race."""

from types import SimpleNamespace

import pytest

from dflop_jax.plan import finalists
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.plan.volume import volume_of
from dflop_jax.records import Load

from ..plans import TILE_TOKENS, bucket, chain, load


def shortened(plan, loads, batch_tokens=(0,)):
    """The plans with shorter rows that are made of a plan for these samples, in batches of so many
    tokens."""
    costs = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": TILE_TOKENS}))
    volumes = {"llm": volume_of("llm", loads, [loads], len(loads), counts_pieces=False)}
    rules = Rules(costs, volumes, SearchSpec(1, len(loads)))

    def n_groups(layout, batch):
        (one,) = layout.buckets
        return max(1, -(-batch_tokens[batch] // one.shape("llm").size))

    evaluator = SimpleNamespace(
        rules=rules, loads=loads, batches=batch_tokens, n_groups=n_groups, fits=lambda plan: True
    )
    found = finalists._with_shorter_rows(evaluator, Candidate(plan, trials_s=(1.0,)))
    assert not any(f.trials_s for f in found)
    return [f.plan.layout.buckets for f in found]


def with_buckets(*buckets):
    return chain(2, vision=1).with_layout(buckets=buckets)


def test_packed_rows_are_tried_as_short_as_the_longest_piece():
    plan = with_buckets(bucket(8, 384, 4), bucket(4, 384, 2), bucket(0, 256))
    found = shortened(plan, [load(2, 337), load(0, 40)])
    assert found == [(bucket(8, 352, 4), bucket(4, 352, 2), bucket(0, 256))]
    assert shortened(plan, [load(1, 353)]) == []  # as short as can be
    unlike = with_buckets(bucket(8, 384, 4), bucket(8, 368, 4))
    assert shortened(unlike, [load(2, 337)]) == [(bucket(8, 352, 4),)]
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
