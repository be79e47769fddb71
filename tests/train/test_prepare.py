"""Where compiled programs are kept."""

import jax
import pytest

from dflop_jax.train import prepare

FOLDER = "jax_compilation_cache_dir"


@pytest.mark.parametrize("told", [None, "/told/to/jax"])
def test_programs_are_kept_where_jax_was_told_to_or_with_the_run(tmp_path, monkeypatch, told):
    monkeypatch.setattr(prepare, "_TOLD_CACHE", told)
    monkeypatch.setattr(prepare.compiler, "_cache_write", prepare.compiler._cache_write)
    before = jax.config.values[FOLDER]
    try:
        prepare.use_cache(tmp_path)
        assert jax.config.values[FOLDER] == (told or str(tmp_path / "xla"))
    finally:
        jax.config.update(FOLDER, before)
