"""Which programs are compiled, and by which process."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from dflop_jax.runtime.compiling import _compiling_process, representatives, threads_for
from dflop_jax.runtime.programs import make_programs

from .test_gradients import DEEP, chunked


def shared_programs(plan):
    """Segment -> the other segment whose programs it runs."""
    programs = make_programs(DEEP, plan.layout, jax.devices(), optax.sgd(1.0))
    return {name: first for name, first in representatives(programs).items() if name != first}


def test_equal_chunks_on_a_rank_share_their_programs():
    """Chunks inside a module with equally many layers and the same recompute policy."""
    plan = chunked(DEEP, 4, {"vision": 1, "llm": 3}, 1)
    shared = {"llm8": "llm4", "llm5": "llm1", "llm9": "llm1", "llm6": "llm2", "llm10": "llm2",
              "llm7": "llm3"}  # fmt: skip
    assert shared_programs(plan) == shared
    other = tuple(
        replace(s, remat="layers") if s.name == "llm5" else s for s in plan.layout.segments
    )
    assert shared_programs(plan.with_layout(segments=other)) == {
        n: first for n, first in shared.items() if n != "llm5"
    }


@pytest.mark.parametrize("platform, by, threads", [("cpu", "257257", 4), ("gpu", "222222", 1)])
def test_one_of_the_processes_that_run_a_program_compiles_it(platform, by, threads):
    """They take turns where nothing is tuned on the devices; else one does all, one at a time."""
    devices = [SimpleNamespace(process_index=p, platform=platform) for p in (7, 2, 2, 5)]
    mesh = SimpleNamespace(devices=np.array(devices))
    segment = SimpleNamespace(mesh=mesh, is_on_cpu=platform == "cpu")
    programs = SimpleNamespace(segments={"a": segment})
    assert "".join(str(_compiling_process(programs, ("a", i), i)) for i in range(6)) == by
    assert threads_for([segment]) == threads
