"""What of a run has a deadline, and how its end is told; see `cluster.hang_watch`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflop_jax.cluster.ending import is_command
from dflop_jax.cluster.hang_watch import HangWatch, Sections, TaskPlace
from dflop_jax.pipeline.executor import Executor
from dflop_jax.report.run_folder import HUNG
from dflop_jax.report.spent import DATA, START, TRAINING
from dflop_jax.train.feed import ReadyBatch, Waits
from dflop_jax.train.prepare import Workplace

FIRST_STEP = "first step"
log = logging.getLogger("dflop_jax")


@contextmanager
def watched(place: Workplace) -> Iterator[None]:
    """Every section of a run has its deadline in here. One process that no command of ours runs (a
    script, a notebook, a debugger) is not ended: what hangs is said and written."""
    settings = place.config.distributed
    if not settings.hang_factor:
        yield
        return
    place.sections.begin(START)
    ends = place.peers.count > 1 or is_command.is_set()
    folder, end = Path(place.config.run_dir, HUNG), None if ends else log.error
    least_s = settings.hang_least_s
    with HangWatch(place.sections, place.peers, folder, least_s=least_s, end=end):
        yield


@contextmanager
def tasks_shown(sections: Sections, ex: Executor) -> Iterator[None]:
    """The sections tell how far the executor's tasks are."""
    under_way = ex.under_way
    sections.tasks = lambda: TaskPlace(*under_way.place())
    try:
        yield
    finally:
        sections.tasks = TaskPlace


def steps_marked(
    sections: Sections, batches: Iterator[tuple[ReadyBatch, Waits]], first: int
) -> Iterator[tuple[ReadyBatch, Waits]]:
    """The batches; what is done between two of them is a step, waiting for one is a section of its
    own."""
    step = first
    while True:
        sections.begin(DATA)
        batch = next(batches, None)
        # What lies between two steps ends with the wait for the one before; the first has none.
        sections.begin(TRAINING if step > first else FIRST_STEP, step)
        if batch is None:
            return
        yield batch
        step += 1
