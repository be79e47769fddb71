"""The job scripts in docs/clusters.md: they parse, and their commands find the right peers.

Slurm and Kubernetes are not here. The test takes the text a user copies, gives it the environment
that the manual of each promises for a certain process, runs the command in it, and looks at whom
that process would meet.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from dflop_jax.cli.derive_config import derive_config
from dflop_jax.cli.main import _parser
from dflop_jax.config import DistributedConfig
from dflop_jax.distributed import processes
from dflop_jax.distributed.process_exit import BAD_INPUT
from dflop_jax.distributed.processes import find_processes

ROOT = Path(__file__).resolve().parents[1]
CLUSTERS = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
INDEX_PATH = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language in docs/clusters.md."""
    return re.findall(rf"```{language}\n(.*?)```", CLUSTERS, re.DOTALL)


SLURM = next(b for b in blocks("bash") if "#SBATCH" in b)
JOBSET = yaml.safe_load(*blocks("yaml"))
(JOB,) = JOBSET["spec"]["replicatedJobs"]
SPEC = JOB["template"]["spec"]
(CONTAINER,) = SPEC["template"]["spec"]["containers"]


def met(words: list[str]) -> tuple[str, int, int]:
    """Of a process that runs a command line: (coordinator, its number, how many there are)."""
    args, extra = _parser().parse_known_args(words[1:])
    assert (words[0], extra) == ("dflop", [])
    found = find_processes(derive_config(args).config.distributed)
    return str(found.coordinator), found.index, found.n_processes


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


# ---- Slurm ----


def sbatch_options() -> dict[str, str]:
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", SLURM, re.MULTILINE))
    assert len(found) == SLURM.count("#SBATCH")
    return found


def slurm_environment(index: int, nodes: int, per_node: int) -> dict[str, str]:
    """What srun sets in the environment of a task, by its manual."""
    return {
        "SLURM_JOB_ID": "4098",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_STEP_NODELIST": "gpu[07-08]" if nodes == 2 else "gpu07",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else f"{per_node}",
        "SLURM_PROCID": str(index),
        "SLURM_NODEID": str(index // per_node),
        "SLURM_LOCALID": str(index % per_node),
    }


def run_slurm_script(folder: Path, programs: dict[str, str], environment: dict[str, str]):
    """The finished script, for which these programs stand in."""
    for name, does in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    script = SLURM.replace("export PATH=", f'export PATH="{folder}:$PATH"; : PATH=')
    env = {"PATH": "/usr/bin:/bin", **environment}
    pipes = {"stdout": subprocess.PIPE, "text": True, "check": False}
    return subprocess.run(["bash"], input=script, env=env, **pipes)


@pytest.mark.parametrize("index", [0, 1])
def test_the_slurm_script_starts_processes_that_meet(monkeypatch, tmp_path, index):
    options = sbatch_options()
    nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
    environment = slurm_environment(index, nodes, per_node)
    # The script itself runs, with an srun that only says what it was asked to start.
    done = run_slurm_script(tmp_path, {"srun": 'printf "%s\\n" "$@"'}, environment)
    said = done.stdout.splitlines()
    assert said[0] == "--wait=60"
    assert options["signal"].startswith("TERM@")  # to the steps; B: is for the script
    assert "requeue" in options
    argv = said[1:]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    coordinator, process, number = met(argv)
    # Port as jax computes it from the job's number: the same on all hosts.
    assert coordinator == f"gpu07:{61440 + 4098 % 4096}"
    assert (process, number) == (index, nodes * per_node)


@pytest.mark.parametrize(
    "code, restarts, requeues",
    [
        *((code, "", False) for code in (0, 1, 2, 139)),
        *((code, restarts, True) for code, restarts in ((3, ""), (4, "0"), (134, ""), (137, "99"))),
        (3, "100", False),
    ],
)
def test_the_slurm_script_is_requeued_by_ends_that_pass(tmp_path, code, restarts, requeues):
    """And ends as its step does."""
    told = {"SLURM_JOB_ID": "4098", "SLURM_SUBMIT_DIR": str(tmp_path)}
    told |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    does = {"srun": f"exit {code}", "scontrol": f'echo "$@" > {tmp_path}/asked'}
    assert run_slurm_script(tmp_path, does, told).returncode == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 4098\n" * requeues


# ---- Kubernetes ----


def test_the_jobset_starts_the_command_of_the_slurm_script():
    """So what is shown of the second start of one holds for the other; a failure starts it."""
    (line,) = [line for line in SLURM.splitlines() if line.startswith("srun ")]
    commands = [line.removeprefix("srun --wait=60 ").removesuffix(" || code=$?")]
    commands.append(" ".join(CONTAINER["command"]))
    plain = [re.sub(r"--run_dir[ =]\S+", "", c).replace("=", " ").split() for c in commands]
    assert plain[0] == plain[1]
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0
    # But bad input fails the Job, and by that reason the JobSet, which counts no restart then.
    (rule,) = SPEC["podFailurePolicy"]["rules"]
    codes = {"containerName": CONTAINER["name"], "operator": "In", "values": [BAD_INPUT]}
    assert rule == {"action": "FailJob", "onExitCodes": codes}
    (rule,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "FailJobSet"
    # Any exit code but 0 of a pod, that of a preempted run as well, is a failure of its Job.
    assert SPEC["backoffLimit"] == 0
    assert SPEC["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("index", [0, 1])
def test_the_jobset_starts_processes_that_meet(monkeypatch, index):
    assert (JOBSET["apiVersion"], JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (SPEC["completionMode"], SPEC["parallelism"]) == ("Indexed", SPEC["completions"])
    volumes = {v["name"] for v in SPEC["template"]["spec"]["volumes"]}
    assert {m["name"] for m in CONTAINER["volumeMounts"]} <= volumes
    # What Kubernetes sets in every pod of an indexed Job, and what the manifest adds.
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
    for entry in CONTAINER["env"]:
        if "value" in entry:
            assert isinstance(entry["value"], str)  # the API server refuses numbers
            environment[entry["name"]] = entry["value"]
        else:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": INDEX_PATH}}
            environment[entry["name"]] = str(index)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    coordinator, process, number = met(CONTAINER["command"])
    host = f"{JOBSET['metadata']['name']}-{JOB['name']}-0-0.{JOBSET['metadata']['name']}"
    assert coordinator == f"{host}:29400"
    assert (process, number) == (index, SPEC["completions"])


# ---- other commands ----


def test_the_command_by_hand():
    (text,) = [b for b in blocks("bash") if "--distributed.coordinator" in b]
    coordinator, process, number = met(shlex.split(text))
    assert (coordinator, process, number) == ("node1:29400", 0, 2)


def test_the_launch_command(monkeypatch):
    text, again = (b for b in blocks("bash") if b.startswith("dflop launch"))
    args = _parser().parse_args(shlex.split(again)[1:])
    assert args.process[1:] == shlex.split(text.partition(" -- ")[2])
    assert args.max_restarts == 20
    words = shlex.split(text)
    at = words.index("--")
    assert words[:at] == ["dflop", "launch", "-n", "2"]
    told = {"COORDINATOR": "127.0.0.1:5", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    for name, value in told.items():
        monkeypatch.setenv(f"DFLOP_{name}", value)
    coordinator, process, number = met(words[at + 1 :])
    assert (coordinator, process, number) == ("127.0.0.1:5", 1, 2)


def test_every_variable_and_flag_named_exists():
    known = {value for name, value in vars(processes).items() if name.endswith("_ENV")}
    assert set(re.findall(r"\bDFLOP_[A-Z_]+", CLUSTERS)) <= known
    fields = {f"--distributed.{f.name}" for f in dataclasses.fields(DistributedConfig)}
    assert set(re.findall(r"--distributed\.[a-z_]+", CLUSTERS)) == fields
