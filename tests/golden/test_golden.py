"""Some golden values of each kind are not worse than the stored ones.

All of them: python -m tests.golden.make --check
"""

import pytest

from . import make


@pytest.mark.parametrize(
    "name", ["plans", "batches", "gradients", pytest.param("losses", marks=pytest.mark.slow)]
)
def test_golden_values_are_not_worse(name):
    if name == "batches" and not make.schedule_run.TRACES.exists():
        pytest.skip("no ../shared/data/shapes")
    assert [text for text, is_worse in make.check(name, quick=True) if is_worse] == []
