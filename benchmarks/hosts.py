"""Real launchers and hosts that fail: does each end as docs/clusters.md says?

Command:  make hosts, or python benchmarks/hosts.py [--only NAME ...] [--quick] [--json FILE]
Minutes:  15 on 2 cores, as root on Debian (Slurm, Open MPI and iproute2 are installed); --quick 4
Expected: every row "as promised"

Two virtual hosts (`virtual_hosts.py`) with a name, an address and a link each train a nano model
by a plan that was made before. What Slurm, Open MPI or somebody by hand starts is disturbed, and
losses are compared with those of a run that was left alone. JobSets cannot be run here; tests parse
them.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import virtual_hosts
import virtual_slurm
from host_site import LIMIT_S, ROOT, Site
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE, shell_exit_code
from dflop_jax.report.run_folder import read_metrics

# Slurm looks every 30 s, and signals where less than the named seconds and 30 more are left: with
# 10 that is 20 to 50 s after a start, when steps are done, and 10 s or more before its second one.
SLURM_TIME = (("--time=04:00:00", "--time=00:01:00"), ("TERM@180", "TERM@10"))
UNFINISHED = "PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED", "CONFIGURING"
PACKAGES = (*virtual_slurm.PACKAGES, "openmpi-bin", "iproute2")
AGENT = """#!{python}
import os, sys
sys.path.insert(0, {benchmarks!r})
from pathlib import Path, PosixPath
from virtual_hosts import Host
host = next(h for h in {hosts!r} if h.name == sys.argv[1])
command = host.command("sh", "-c", " ".join(sys.argv[2:]))
os.execvp(command[0], command)
"""


# ---- what is tried; each says in a line what it saw, and asserts what docs/clusters.md promises


def slurm_time_limit(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """The script of docs/clusters.md, ended by its time limit, requeued and done"""
    script = (ROOT / "docs/clusters.md").read_text()
    script = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", script, re.DOTALL)[0]
    for old, new in SLURM_TIME:
        assert old in script
        script = script.replace(old, new)
    (site.folder / "job.sh").write_text(script)
    with virtual_slurm.virtual_slurm(hosts, site.folder / "slurm") as slurm:
        words = "sbatch", "--parsable", "--export=ALL", "job.sh"
        number = slurm.said("env", f"PYTHONPATH={ROOT}", *words, cwd=site.folder).strip()
        deadline = time.monotonic() + LIMIT_S
        while (job := slurm.job(number))["JobState"] in UNFINISHED:
            assert time.monotonic() < deadline, job
            time.sleep(1.0)
        said = (site.folder / f"slurm-{number}.out").read_text(errors="replace")
        assert job["JobState"] == "COMPLETED", (job["JobState"], said)
        assert int(job["Restarts"]) >= 1, "it was done before its time was over"
        assert site.is_whole(number)
        steps = re.findall(r"preempted at step (\d+)", said)
    return f"requeued {job['Restarts']} times, at step {', '.join(steps)}; losses equal"


def slurm_first_dies(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """Process 0 is killed under `srun`"""
    with virtual_slurm.virtual_slurm(hosts, site.folder / "slurm-dies") as slurm:
        srun = "srun", "-N2", "--wait=60", "dflop", "train", "experiments/demo.py"
        command = hosts.hosts[0].command(*srun, "--plan.devices", "0", "--run_dir", "runs/dies")
        job = site.run(command, "dies", {**slurm.environment, **site.environment})
        site.wait_for_steps("dies", 5, [job])
        os.kill(trainer(hosts.hosts[0]), signal.SIGKILL)
        assert job.wait() == shell_exit_code(-signal.SIGKILL), job.said()
        return job.line(r"Terminating process because the JAX distributed service")


def open_mpi(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """`mpirun` starts it, SIGTERM to `mpirun` ends it, the same command goes on"""
    agent = site.folder / "rsh"
    here = {"python": sys.executable, "benchmarks": str(ROOT / "benchmarks")}
    agent.write_text(AGENT.format(hosts=hosts.hosts, **here))
    agent.chmod(0o755)
    names = ",".join(h.name for h in hosts.hosts)
    mpirun = ["mpirun", "--allow-run-as-root", "-H", names, "--mca", "plm_rsh_agent", str(agent),
              "--mca", "oob_tcp_if_include", "eth0", "-x", "PATH",
              "-x", "PYTHONPATH", "dflop", "train", "experiments/demo.py", "--run_dir", "runs/mpi",
              "--resume", "auto"]  # fmt: skip
    job = site.run(hosts.hosts[0].command(*mpirun), "mpi")
    site.wait_for_steps("mpi", site.steps // 3, [job])
    job.popen.send_signal(signal.SIGTERM)
    first = job.wait()
    saved = job.line(r"preempted at step \d+")
    job = site.run(hosts.hosts[0].command(*mpirun), "mpi")
    assert job.wait() == 0, job.said()
    assert site.is_whole("mpi")
    return f"{saved} (mpirun: exit code {first}); then done, losses equal"


def short_partition(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """10 s of partition inside a step, within peer_timeout_s"""
    jobs = site.train_by_hand(hosts, "short")
    site.wait_for_steps("short", site.steps // 4, jobs)
    hosts.cut([0], [1])
    time.sleep(10.0)
    hosts.join()
    assert [job.wait() for job in jobs] == [0, 0], [job.said() for job in jobs]
    assert site.is_whole("short")
    longest = max(row["step_s"] for row in read_metrics(site.folder / "runs/short"))
    assert longest > 5.0, "nothing was cut off"
    return f"the longest step took {longest:.0f} s; no restart, losses equal"


def long_partition(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """60 s of partition: process 0 names the other, which jax ends"""
    jobs = site.train_by_hand(hosts, "long")
    site.wait_for_steps("long", 30, jobs)
    hosts.cut([0], [1])
    begun = time.monotonic()
    codes = [job.wait() for job in jobs]
    took_s = time.monotonic() - begun
    assert codes == [TRANSIENT_FAILURE, -signal.SIGABRT], (codes, [job.said() for job in jobs])
    assert took_s < 60.0, took_s
    said = jobs[0].line(r"process 1 \([^)]*\) is silent")
    hosts.join()
    jobs = site.train_by_hand(hosts, "long", "--resume", "auto")
    assert [job.wait() for job in jobs] == [0, 0], [job.said() for job in jobs]
    assert site.is_whole("long")
    return f"{said}: exit codes 4 and 134 after {took_s:.0f} s; resumed, losses equal"


def no_such_name(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """A coordinator whose name leads nowhere"""
    words = "train experiments/demo.py --distributed.coordinator no-such-host:29400"
    words += " --distributed.num_processes 2 --distributed.process_id 1"
    words += " --distributed.connect_timeout_s 3"
    job = site.start(words, "nowhere", hosts.hosts[1])
    assert job.wait() == TRANSIENT_FAILURE, job.said()
    assert "Traceback" not in job.said(), job.said()
    return job.line(r"process 1 did not reach process 0[^;]*")


def slow_link(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """A link of 20 Mbit/s"""
    hosts.limit("20mbit")
    try:
        jobs = site.train_by_hand(hosts, "slow")
        assert [job.wait() for job in jobs] == [0, 0], [job.said() for job in jobs]
    finally:
        hosts.limit(None)
    assert site.is_whole("slow")
    return "done, losses equal"


def two_runs(site: Site, hosts: virtual_hosts.Hosts) -> str:
    """Two runs on one host at once, and a third one in the folder of the first"""
    words = "launch -n 2 --devices-per-process 1 -- dflop train experiments/demo.py --run_dir runs/"
    host = hosts.hosts[0]
    jobs = [site.start(f"{words}{name}", name, host) for name in ("one", "two")]
    site.wait_for_steps("one", 2, jobs)
    third = site.start(f"{words}one --overwrite", "third", host)
    assert third.wait() == TRANSIENT_FAILURE, third.said()
    assert [job.wait() for job in jobs] == [0, 0], [job.said() for job in jobs]
    assert site.is_whole("one")
    assert site.is_whole("two")
    return f"both done, losses equal; the third: {third.line('another run[^;,]*')}"


def trainer(host: virtual_hosts.Host) -> int:
    """The process on a host that trains."""
    for pid in host.pids():
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
        if words[0] == sys.executable.encode() and b"train" in words:
            return pid
    raise AssertionError(f"nothing trains on {host.name}")


TRIED: tuple[Callable[[Site, virtual_hosts.Hosts], str], ...] = (
    no_such_name, open_mpi, short_partition, long_partition, two_runs, slow_link,
    slurm_time_limit, slurm_first_dies,
)  # fmt: skip
QUICK = "no_such_name", "open_mpi", "long_partition"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_json(parser)
    names = [each.__name__ for each in TRIED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="some of them, with fewer steps")
    parser.add_argument("--steps", type=int, default=2000, help="of each run (default 2000)")
    args = parser.parse_args()
    if why := needs():
        print(f"hosts: {why}", file=sys.stderr)
        return 1
    chosen = [t for t in TRIED if t.__name__ in (QUICK if args.quick else args.only)]
    rows = Rows(args.json, as_rows)
    with tempfile.TemporaryDirectory(prefix="dflop-hosts-") as name:
        Path(name).chmod(0o755)  # munge asks for it
        site = Site(Path(name), 200 if args.quick else args.steps)
        site.prepare()
        for tried in chosen:
            begun = time.monotonic()
            with virtual_hosts.virtual_hosts(2) as hosts:
                try:
                    seen, kept = tried(site, hosts), True
                except (AssertionError, RuntimeError, subprocess.SubprocessError) as e:
                    said = f"{type(e).__name__}: {e}"
                    seen = said if len(said) < 2000 else f"{said[:300]} ... {said[-1500:]}"
                    kept = False
            took_s = time.monotonic() - begun
            rows.append({"name": tried.__name__, "tried": tried.__doc__, "as_promised": kept,
                         "seen": seen, "seconds": took_s})  # fmt: skip
    table = Table("tried", "as promised", "seen", "s")
    for row in rows:
        promised = "yes" if row["as_promised"] else "NO"
        table.add_row(str(row["tried"]), promised, str(row["seen"]), f"{row['seconds']:.0f}")
    Console(width=160).print(table)
    return 0 if all(row["as_promised"] for row in rows) else 1


def needs() -> str:
    """What is needed and cannot be had, in words; "" when all is there. Installs packages."""

    def missing() -> str:
        from shutil import which

        first = virtual_hosts.missing() or virtual_slurm.missing()
        return first or "needs mpirun: apt-get install openmpi-bin" * (which("mpirun") is None)

    if os.geteuid() == 0 and missing():
        install = ["apt-get", "install", "--yes", "-qq", *PACKAGES]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], install):
            try:
                subprocess.run(command, env=environment, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as e:
                return f"cannot install {', '.join(PACKAGES)}: {e}"
    return missing()


if __name__ == "__main__":
    sys.exit(main())
