"""A real run of two processes whose port is attacked while they meet: its losses stay the same.

The full attack, 1,000 connections, is benchmarks/hostile.py.
"""

from __future__ import annotations

import re

from tests.train.many import FOUR, LIMIT_S, Jobs, losses

from .attackers import KINDS, besieged

STEPS = 6
ROUNDS = 20  # of every kind of attack


def test_an_attacked_run_has_the_same_losses(tmp_path):
    jobs = Jobs.make(tmp_path, FOUR, steps=STEPS, every=1000)
    for name, connections in (("quiet", 0), ("attacked", ROUNDS * len(KINDS))):
        command = jobs.command(2, tmp_path / name)
        train = command[command.index("dflop") :]
        codes, outputs, strangers = besieged(train, connections, LIMIT_S)
        assert codes == [0, 0], outputs
        lines = re.findall(r"turned away (\d+) connections", " ".join(outputs[0].split()))
        assert lines == ([str(strangers.connected)] if connections else [])
        assert "turned away" not in outputs[1]
    assert losses(tmp_path / "attacked") == losses(tmp_path / "quiet")
