"""8 CPU devices and strict arrays for every test."""

import tempfile
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Worker processes, and later runs, share what they compile.
jax.config.update("jax_compilation_cache_dir", f"{tempfile.gettempdir()}/dflop_jax_tests_xla")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real media beside the checkout; tests that need it skip without it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "dataset.json").exists():
        pytest.skip("no ../shared/data")
    return folder
