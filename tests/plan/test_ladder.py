"""Smaller buckets beside the one that placements are ranked with."""

import dataclasses
from types import SimpleNamespace

import pytest

from dflop_jax.config import PlanConfig
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.plan.uniform import ladder_of, with_ladder
from dflop_jax.records import Bucket, Shape

from ..plans import chain


def rules(buckets, longest=20):
    spec = SearchSpec(1, 8, PlanConfig(buckets=buckets), token_multiple=32)
    costs = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": 16}))
    return Rules(costs, {"llm": SimpleNamespace(longest=longest)}, spec)


def ladder(vision, llm, buckets, **options):
    """Share -> shapes of the smaller buckets."""
    bucket = Bucket.of({"vision": Shape(*vision), "llm": Shape(*llm)})
    layout = dataclasses.replace(chain(2, vision=1).layout, buckets=(bucket,))
    given = rules(buckets, **options)
    (first, whole), *rest = ladder_of(layout, given).items()
    assert (first, whole) == (bucket, 1.0)
    assert with_ladder(layout, given).buckets == (first, *(b for b, _ in rest))
    return {share: tuple((s.rows, s.tokens) for _, s in b.shapes) for b, share in rest}


@pytest.mark.parametrize(
    "vision, llm, expected",
    [
        ((10, 16), (5, 128), {0.6: ((6, 16), (3, 128))}),
        ((10, 16), (4, 128), {0.75: ((6, 16), (3, 128))}),  # whole rows
        ((1, 16), (1, 320), {0.6: ((1, 16), (1, 192))}),  # one packed row is cut, a piece is not
        ((1, 16), (1, 128), {0.75: ((1, 16), (1, 96))}),  # to a multiple of 32
        ((2, 16), (1, 32), {}),  # nothing to cut
    ],
)
def test_rows_or_tokens_of_one_row(vision, llm, expected):
    assert ladder(vision, llm, 2) == expected


def test_a_row_still_holds_the_longest_piece():
    assert ladder((1, 16), (1, 320), 2, longest=230) == {0.8: ((1, 16), (1, 256))}
    assert ladder((1, 16), (1, 320), 2, longest=300) == {}


def test_as_many_as_plans_may_have_and_are_unlike():
    large = (10, 16), (10, 128)
    assert ladder(*large, 1) == {}
    assert list(ladder(*large, 3)) == [0.6, 0.3]
    four = {0.8: ((8, 16), (8, 128)), 0.6: ((6, 16), (6, 128)), 0.3: ((3, 16), (3, 128))}
    assert ladder(*large, 4) == ladder(*large, 9) == four
    assert ladder((2, 16), (2, 128), 4) == {0.5: ((1, 16), (1, 128))}
    assert ladder((1, 16), (1, 32), 4) == {}
