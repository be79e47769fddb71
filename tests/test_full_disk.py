"""Logs on a full disk, which end no process."""

import subprocess
import sys
from pathlib import Path

import pytest

from dflop_jax import full_disk

FULL = Path("/dev/full")
PROGRAM = """
import os, sys
from dflop_jax.full_disk import need_no_log

if {drops}:
    need_no_log()
for stream in (sys.stdout, sys.stderr):
    print("a line", file=stream)
    stream.flush()
os._exit(0)
"""


def end_of(drops, **streams):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(drops=drops)], check=False, text=True, **streams
    )


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_log_without_room_loses_lines_and_ends_nothing(stream):
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    with FULL.open("w") as full:
        done = end_of(True, **{stream: full, other: subprocess.PIPE})
        assert (done.returncode, getattr(done, other)) == (0, "a line\n")
        assert end_of(False, **{stream: full, other: subprocess.DEVNULL}).returncode != 0


def test_other_errors_of_a_log_are_raised():
    with open(__file__) as only_read, pytest.raises(OSError, match="Bad file descriptor"):
        full_disk._Dropping(only_read.fileno(), "w", closefd=False).write(b"a line")
