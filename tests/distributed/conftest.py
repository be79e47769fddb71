"""Processes of a run, played by threads (`service`)."""

from __future__ import annotations

import pytest

from dflop_jax.distributed import messages

from .service import make_job


@pytest.fixture
def job(monkeypatch):
    """Makes a job of `n` processes, whose threads end with the test."""
    made = []
    monkeypatch.setattr(messages, "POLL_S", 0.1)
    monkeypatch.setattr(messages, "HEARTBEAT_S", 0.05)

    def make(*args, **kwargs):
        made.append(make_job(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.stop()
