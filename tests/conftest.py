"""8 CPU devices and strict arrays for every test."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real media beside the checkout; tests that need it skip without it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "dataset.json").exists():
        pytest.skip("no ../shared/data")
    return folder
