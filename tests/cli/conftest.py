"""A folder for every test of the command line, with an experiment, a plan and a profile in it."""

from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from dflop_jax.record_files import save
from tests.cli.command_line import EXPERIMENT
from tests.plans import NANO, nano_profile


@contextmanager
def jax_settings_kept():
    """Leave this process the compilation cache that it had."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    kept = {n: getattr(jax.config, n) for n in names}
    try:
        yield
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Relative paths land in tmp_path; the process keeps its devices and its compile cache."""
    jax.devices()  # started with conftest's 8, so that plan.devices cannot change their number
    monkeypatch.chdir(tmp_path)
    Path("nano.py").write_text(EXPERIMENT)
    save(NANO, "nano_plan.json")
    save(nano_profile(), "nano_profile.json")
    with jax_settings_kept():
        yield
