"""A rule in place of the bucket search, which has tests of its own and takes seconds."""

import pytest

from dflop_jax.plan import refine_buckets

from .cases import simple_buckets


@pytest.fixture(autouse=True)
def _quick_buckets(monkeypatch, request):
    if "real_buckets" not in request.fixturenames:
        monkeypatch.setattr(refine_buckets, "choose_buckets", simple_buckets)


@pytest.fixture
def real_buckets():
    """For tests that use the bucket search itself."""
