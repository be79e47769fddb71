"""What a run and the agent that starts it again (`dflop launch`) have to do with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax

from dflop_jax.cluster import told
from dflop_jax.cluster.ending import TryAgain, exit_code_of
from dflop_jax.cluster.peers import Peers
from dflop_jax.config import Config
from dflop_jax.records import Plan
from dflop_jax.report.run_folder import RESTARTS, FolderInUse, RunFolder
from dflop_jax.train.run_dir import is_of_launch


def is_begun(run_dir: str, peers: Peers) -> bool:
    """Whether this is a restart of a run that its launch has begun in this folder before. A script
    may train in several folders: others may hold older runs, which are not to be gone on with.
    Process 0, which writes there, says so to all."""
    if not peers.is_hub:  # its agent, too, has to know the folder when process 0's host is gone
        told.tell_begun(Path(run_dir) / RESTARTS)
    begun = told.is_restart() and is_of_launch(run_dir)
    return peers.share("begun", str(int(begun)).encode() if peers.is_hub else None) == b"1"


def open_folder(run_dir: str, existing: Literal["error", "overwrite", "resume"]) -> RunFolder:
    """Process 0's run folder, of which its agent is told.

    Raises:
      TryAgain: another run writes to it.
      ValueError: see `RunFolder`.
    """
    try:
        folder = RunFolder(run_dir, existing=existing, launch=told.launch_name())
    except FolderInUse as e:
        raise TryAgain(str(e)) from None
    told.tell_begun(folder.path / RESTARTS)
    return folder


def check_agents(plan: Plan | None, config: Config) -> None:
    """ValueError where the agents that start the run cannot do what is asked of them."""
    if not (least := told.least_processes()):
        return
    asked = f"dflop launch --min-processes {least} goes on with fewer processes"
    if plan is not None:
        n = max(m.devices.stop for m in plan.layout.submeshes)
        raise ValueError(f"{asked}, and --plan-file gives a plan for {n} devices; leave it out")
    if not config.checkpoint.saves:
        raise ValueError(
            f"{asked} from a checkpoint, and checkpoint.every_s=0 writes none; leave it at 600"
        )


def tell_others(peers: Peers, error: BaseException) -> bool:
    """Tell all processes that this one stops by an error; whether nothing had failed before."""
    if isinstance(error, jax.errors.JaxRuntimeError):  # which a lost process causes as well
        peers.notice()
    return peers.fail(f"process {peers.process} stopped: {line_of(error)}", exit_code_of(error))


def tell_agent(
    error: BaseException, step: int | None = None, samples: tuple[str, ...] = ()
) -> None:
    """This process ends by an error of its own, at a step with these samples in its batch."""
    host = error.host if isinstance(error, TryAgain) else ""
    told.tell_failure(told.Failure(exit_code_of(error), line_of(error), step, samples, host))


def line_of(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
