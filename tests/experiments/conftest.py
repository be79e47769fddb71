"""A fixture for small profiles in experiments on small models."""

import pytest

from experiments.paper import cases, costs


@pytest.fixture(scope="module")
def small_profiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "PROFILE_SAMPLES", 64)
        patch.setattr(cases, "POPULATION_SAMPLES", 512)
        patch.setattr(cases, "TUNING_BATCHES", 2)
        patch.setattr(costs, "DEGREES", (1, 2))
        patch.setattr(costs, "PIECES", (1, 8))
        patch.setattr(costs, "TOKENS", (512, 2048))
        yield
