"""A Slurm of virtual hosts: its controller on the first, one slurmd on each, munge among them.

Nodes have 32 cores and 8 GPUs in name only, so that scripts for real nodes are accepted.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from virtual_hosts import Hosts

PACKAGES = "slurmctld", "slurmd", "munge"
READY_S = 60.0
_CONFIG = """
ClusterName=dflop
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=5
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What is needed and not there, in words; "" for nothing."""
    absent = [p for p in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(p) is None]
    return f"needs {', '.join(absent)}: apt-get install {' '.join(PACKAGES)}" * bool(absent)


@dataclass(frozen=True)
class Slurm:
    """Commands of a Slurm, run on its first host."""

    hosts: Hosts
    folder: Path

    def said(self, *words: str, cwd: Path | None = None) -> str:
        """What a command prints.

        Raises:
          subprocess.CalledProcessError: it fails.
        """
        first = self.hosts.hosts[0]
        done = subprocess.run(
            first.command(*words), cwd=cwd, env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def job(self, number: str) -> dict[str, str]:
        """What is known of a job."""
        words = self.said("scontrol", "--oneliner", "show", "job", number).split()
        return {k: v for k, is_set, v in (word.partition("=") for word in words) if is_set}


@contextmanager
def virtual_slurm(hosts: Hosts, folder: Path) -> Iterator[Slurm]:
    """A Slurm that is ready, and gone at the end.

    Raises:
      RuntimeError: it does not become ready.
    """
    slurm = Slurm(hosts, folder)
    folder.mkdir()
    folder.chmod(0o755)
    first = hosts.hosts[0]
    each = "CPUs=32 RealMemory=1000 Gres=gpu:8 State=UNKNOWN"
    nodes = "\n".join(f"NodeName={h.name} NodeAddr={h.address} {each}" for h in hosts.hosts)
    files = {"folder": folder, "controller": first.name, "address": first.address, "nodes": nodes}
    (folder / "slurm.conf").write_text(_CONFIG.format(**files))
    for gpu in range(8):  # Slurm counts those whose device files are there
        os.mknod(folder / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    with ExitStack() as stack:

        def start(name: str, *words: str) -> None:
            log = stack.enter_context((folder / f"{name}.out").open("wb"))
            daemon = subprocess.Popen(words, env=slurm.environment, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)

        paths = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid"}
        paths |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        start("munged", "munged", "--foreground", "--force",
              *(f"--{option}={folder / file}" for option, file in paths.items()))  # fmt: skip
        _await("munge", lambda: (folder / "munge.socket").exists())
        start("slurmctld", *first.command("slurmctld", "-D"))
        for host in hosts.hosts:
            (folder / host.name).mkdir()
            start(host.name, *host.command("slurmd", "-D", "-N", host.name))
        _await("Slurm", lambda: _idle(slurm) == len(hosts.hosts))
        yield slurm


def _idle(slurm: Slurm) -> int:
    try:
        return slurm.said("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    except subprocess.CalledProcessError:
        return 0


def _await(what: str, ready) -> None:
    deadline = time.monotonic() + READY_S
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not become ready in {READY_S:g} s")
        time.sleep(0.2)
