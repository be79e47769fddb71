"""Profiles of few shapes and samples, for experiments on small models."""

import pytest

from experiments.paper import cases, costs


@pytest.fixture(scope="module")
def small_profiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "SEEN", 64)
        patch.setattr(cases, "TUNING", 2)
        patch.setattr(costs, "DEGREES", (1, 2))
        patch.setattr(costs, "ITEMS", (1, 8))
        patch.setattr(costs, "TOKENS", (512, 2048))
        yield
