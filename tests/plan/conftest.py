"""A rule in place of the bucket search, which has tests of its own and takes seconds."""

import math

import numpy as np
import pytest

from dflop_jax.plan import refine_buckets
from dflop_jax.records import Bucket, Shape
from dflop_jax.schedule import BucketChoice


def simple_buckets(loads, problem, *, effort, **options):
    """One bucket for all (the largest sample, or an even share of the batch), and one without
    tiles."""
    shapes = {}
    for m, ranks in problem.ranks.items():
        tile, multiple = problem.piece_tokens.get(m), problem.token_multiple
        totals = [len(n.lengths(m)) if tile else n.tokens(m) for n in loads]
        share = problem.global_batch * np.mean(totals) / problem.max_microbatches
        need = math.ceil(max(max(totals), 1.3 * share) / ranks)
        longest = max((n for load in loads for n in load.lengths(m)), default=0)
        tokens = -(-max(need, longest) // multiple) * multiple
        shapes[m] = (Shape(need, tile) if tile else Shape(1, tokens)) if need else None
    both = Bucket.from_shapes(shapes)
    without = [(m, s) for m, s in both.shapes if m != "vision"]
    return BucketChoice(tuple(dict.fromkeys([both, Bucket(tuple(without))])), 0.0)


@pytest.fixture(autouse=True)
def _quick_buckets(monkeypatch):
    monkeypatch.setattr(refine_buckets, "choose_buckets", simple_buckets)
