"""The integer programs of plans' batches, kept in the cache folder once cvxpy has written them.

A start that finds its own does not import cvxpy, which takes more than a second and 73 MB.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from dflop_jax.record_files import load, save
from dflop_jax.records import Plan
from dflop_jax.schedule.counts import program as written
from dflop_jax.schedule.counts.program import CountProgram, canonical, sizes_of


def count_program(plan: Plan, cache_dir: str | Path) -> CountProgram | None:
    """The program of a plan, from the cache folder where it is there; None where its groups are not
    balanced."""
    if plan.scheduling.grouping != "balanced":
        return None
    sizes = sizes_of(plan.layout)
    code = hashlib.sha256(Path(written.__file__).read_bytes()).hexdigest()
    facts = f"{sizes} {version('cvxpy')} {code}"
    file = Path(cache_dir, f"counts-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")
    with suppress(ValueError):  # none yet, or a damaged one
        return load(CountProgram, file)
    program = canonical(sizes)
    with suppress(OSError):  # a full disk costs time in the next start only
        file.parent.mkdir(parents=True, exist_ok=True)
        save(program, file)
    return program
