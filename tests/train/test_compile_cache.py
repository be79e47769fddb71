"""Compiled programs on disk: where they are kept, and by whom."""

import os
import subprocess
import sys

import jax
import pytest

from dflop_jax.train import run_context

from ..processes import ROOT

FOLDER = "jax_compilation_cache_dir"


@pytest.mark.parametrize("told", [None, "/told/to/jax"])
def test_programs_are_kept_where_jax_was_told_to_or_with_the_run(tmp_path, monkeypatch, told):
    monkeypatch.setattr(run_context, "_USER_CACHE_DIR", told)
    monkeypatch.setattr(run_context.compiler, "_cache_write", run_context.compiler._cache_write)
    before = jax.config.values[FOLDER]
    try:
        run_context.use_cache(tmp_path)
        assert jax.config.values[FOLDER] == (told or str(tmp_path / "xla"))
    finally:
        jax.config.update(FOLDER, before)


# A process of its own, as jax takes up a cache once. Prints how many programs it compiled, and how
# many it found.
PROGRAM = """
import jax, sys, warnings
warnings.simplefilter("error")
from jax._src import distributed
from dflop_jax.train.run_context import use_cache
distributed.global_state.process_id = 1  # of which jax itself keeps no programs
use_cache(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(lambda e, **_: hits.append(e))
jax.jit(lambda x: x * 2 + 1)(3.0).block_until_ready()
print(sum(e.endswith("/cache_misses") for e in hits), sum(e.endswith("/cache_hits") for e in hits))
"""


def test_every_process_keeps_its_programs(tmp_path):
    def run() -> list[int]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return [int(n) for n in done.stdout.split()]

    misses, hits = run()
    assert misses > 0
    assert hits == 0
    assert run() == [0, misses]
