"""Half a bucket beside the one that placements are ranked with."""

import dataclasses
from types import SimpleNamespace

import pytest

from dflop_jax.config import PlanConfig
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.half import with_half
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.records import Bucket, Shape

from ..plans import chain


def rules(buckets=2, multiple=32):
    config = PlanConfig(buckets=buckets)
    spec = SearchSpec(1, 8, config, token_multiple=multiple)
    costs = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": 16}))
    return Rules(costs, {}, spec)


def halves(vision, llm, **options):
    """Shapes of the second bucket, () where there is none."""
    bucket = Bucket.of({"vision": Shape(*vision), "llm": Shape(*llm)})
    layout = dataclasses.replace(chain(2, vision=1).layout, buckets=(bucket,))
    first, *rest = with_half(layout, rules(**options)).buckets
    assert first == bucket
    return tuple((s.rows, s.tokens) for b in rest for _, s in b.shapes)


@pytest.mark.parametrize(
    "vision, llm, expected",
    [
        ((8, 16), (4, 128), ((4, 16), (2, 128))),
        ((9, 16), (3, 128), ((4, 16), (1, 128))),  # never more than half
        ((1, 16), (1, 128), ((1, 16), (1, 64))),  # one packed row is cut, a piece is not
        ((1, 16), (1, 160), ((1, 16), (1, 64))),  # to a multiple of 32
        ((1, 16), (1, 32), ()),  # nothing to halve
        ((2, 16), (1, 32), ((1, 16), (1, 32))),
    ],
)
def test_rows_or_tokens_of_one_row(vision, llm, expected):
    assert halves(vision, llm) == expected


def test_plans_of_one_bucket_have_none():
    assert halves((8, 16), (4, 128), buckets=1) == ()
