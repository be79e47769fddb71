"""Numbers of the code that docs/clusters.md and docs/checkpoints.md promise, each said with what it
is there for: whoever changes one changes the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflop_jax.checkpoint import format as files
from dflop_jax.checkpoint import reader, writer
from dflop_jax.cluster import (
    distributed,
    door,
    ending,
    handshake,
    peers,
    sections,
    supervisor,
    tree,
)
from dflop_jax.config import CheckpointConfig, Config
from dflop_jax.records import USABLE_MEMORY

DOCS = Path(__file__).resolve().parents[1] / "docs"
MIB = 1 << 20
RUN = Config().distributed
HELLO_BYTES = 2 * handshake.NONCE_BYTES + handshake._LENGTH.size + handshake.HELLO_BYTES
READ_BYTES = reader.RUN_BYTES + reader.CACHED_BLOCKS * files.BLOCK_BYTES
BEAT_S = peers.LONGEST_BEAT_S
ENDS_S = distributed.SHUTDOWN_S + distributed.LEAVE_S

CLUSTERS = [
    f"(SIGTERM, SIGKILL {supervisor.STOP_GRACE_S:g} s later, which",
    f"two within {ending.ONE_SIGNAL_S:g} s count as one",
    f"kills those that have not ended after {supervisor.RESTART_GRACE_S:g} s",
    f"at once, then after {supervisor.FIRST_WAIT_S:g}, 2, 4 ... {supervisor.MAX_WAIT_S:g} s",
    f"| `XLA_CLIENT_MEM_FRACTION={USABLE_MEMORY}`",
    f"plans count with {USABLE_MEMORY:.0%}",
    f"within {door.PROVE_S:g} s, after {HELLO_BYTES:,} bytes at most, at most "
    f"{door.MOST_STRANGERS} at a time",
    f"With more than {tree.FAN_OUT + 1} processes",
    f"(process (i - 1) // {tree.FAN_OUT} of process i) and to at most {tree.FAN_OUT} children",
    f"a process leaves that message {'a second' if peers.NOTICE_S == 1 else peers.NOTICE_S}",
    f"A Python script of yours ends within {ENDS_S:g} s once it is over",
    f"while all leave, the others end after {distributed.LEAVE_S:g} s (exit code",
    f"`--distributed.hang_factor` ({RUN.hang_factor:g}) times the longest that was measured of it "
    f"in the last {sections.REMEMBERED}, and at least `--distributed.hang_least_s` "
    f"({RUN.hang_least_s:g} s)",
    f"have {sections.UNMEASURED} times the least",
    f"those of its children every {'second' if BEAT_S == 1 else BEAT_S}",
]
CHECKPOINTS = [
    f"a CRC-32 of every {'MiB' if files.BLOCK_BYTES == MIB else files.BLOCK_BYTES} of every file",
    f"flushed while it wrote (every {writer.FLUSH_BYTES // MIB} MiB",
    f"only the blocks of {files.BLOCK_BYTES // MIB} MiB that overlap",
    f"holds about {READ_BYTES // MIB} MiB beside its answer",
    f"Every `checkpoint.every_s` seconds ({CheckpointConfig().every_s:g}",
    f"Kept are the newest `checkpoint.keep` ({CheckpointConfig().keep})",
]


@pytest.mark.parametrize(
    ("page", "promise"),
    [(page, p) for page, said in (("clusters", CLUSTERS), ("checkpoints", CHECKPOINTS))
     for p in said],
)  # fmt: skip
def test_a_number_is_the_documents(page, promise):
    text = " ".join((DOCS / f"{page}.md").read_text(encoding="utf-8").split())
    assert promise in text
