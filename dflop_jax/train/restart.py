"""What a run resumes that `dflop launch` starts again, and how its processes learn of an error."""

from __future__ import annotations

from typing import Literal

import jax

from dflop_jax.cluster.ending import TryAgain, exit_code_of
from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.cluster.supervised import is_restart, launch_name
from dflop_jax.report.run_folder import FolderInUse, RunFolder
from dflop_jax.train.run_dir import is_of_launch


def is_begun(run_dir: str, peers: ProcessGroup) -> bool:
    """Whether this is a restart of a run that its launch has begun in this folder before. A script
    may train in several folders: others may hold older runs, which are not to be resumed. Process
    0, which writes there, says so to all."""
    begun = is_restart() and is_of_launch(run_dir)
    return peers.broadcast("begun", str(int(begun)).encode() if peers.is_hub else None) == b"1"


def open_folder(run_dir: str, existing: Literal["error", "overwrite", "resume"]) -> RunFolder:
    """Process 0's run folder.

    Raises:
      TryAgain: another run writes to it.
      ValueError: see `RunFolder`.
    """
    try:
        return RunFolder(run_dir, existing=existing, launch=launch_name())
    except FolderInUse as e:
        raise TryAgain(str(e)) from None


def tell_others(peers: ProcessGroup, error: BaseException) -> None:
    """Tell all processes that this one stops by an error."""
    if isinstance(error, jax.errors.JaxRuntimeError):  # which a lost process causes as well
        peers.notice()
    says = " ".join(str(error).split()) or type(error).__name__
    peers.fail(f"process {peers.process} stopped: {says}", exit_code_of(error))
