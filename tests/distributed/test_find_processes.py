"""Who says which processes a run has: flags, `dflop launch`, Slurm, Open MPI, Kubernetes.

No cluster is here: the variables are those its manual promises to a process.
"""

from __future__ import annotations

import os
import re

import pytest

from dflop_jax.config import DistributedConfig
from dflop_jax.distributed import processes
from dflop_jax.distributed.processes import Address, Processes, find_processes

AT, LOCAL = Address("node1", 29400), Address("127.0.0.1", 4000)
FLAGS = DistributedConfig(coordinator="node1:29400", num_processes=2, process_id=1)
LAUNCHED = {
    "DFLOP_COORDINATOR": "127.0.0.1:4000",
    "DFLOP_NUM_PROCESSES": "4",
    "DFLOP_PROCESS_ID": "3",
    "DFLOP_LOCAL_PROCESSES": "4",
    "DFLOP_LOCAL_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "node[05,07-08]",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1"}
OWN = re.compile("DFLOP_|SLURM_|OMPI_|JAX_COORDINATOR|KUBERNETES_|JOB_COMPLETION|CUDA_VISIBLE")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    """Whatever starts the tests, they are one process."""
    for name in [n for n in os.environ if OWN.match(n)]:
        monkeypatch.delenv(name)


@pytest.fixture
def environment(monkeypatch):
    def put(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def slurm(node, index=3, n_local=2, local_index=1):
    return Processes(5, index, Address(*node), "Slurm", n_local, local_index)


def open_mpi(*address):
    return Processes(4, 2, Address(*address), "Open MPI", 2)


@pytest.mark.parametrize(
    "values, found",
    [
        ({}, Processes()),
        (LAUNCHED | SLURM, Processes(4, 3, LOCAL, "dflop launch", 4, 3)),
        ({k: v for k, v in LAUNCHED.items() if "LOCAL" not in k},
         Processes(4, 3, LOCAL, "DFLOP_* variables")),
        # jax's rule for the port: 61440 + the job's number modulo 4096
        (SLURM, slurm(("node05", 61441))),
        (SLURM | {"SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"},
         slurm(("node05", 61441), 4, 1, 0)),
        *((SLURM | {"SLURM_STEP_NODELIST": nodes}, slurm((first, 61441))) for nodes, first in (
            ("rack[1-2]n[01-02]", "rack1n01"), ("r[2,4]-n[007,9-12]-ib,login", "r2-n007-ib"),
            ("a-1,b[1-3]", "a-1"))),
        (SLURM | {"JAX_COORDINATOR_PORT": "5000"}, slurm(("node05", 5000))),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "ib0:7"}, slurm(("ib0", 7))),
        # a batch script outside srun, the shell of salloc, a step of one task
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, Processes()),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, Processes()),
        (OPEN_MPI, open_mpi("10.96.0.1", 61440 + 1531576320 // 4096 % 4096)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,26::2]:1"},
         open_mpi("fe80::1", 61441)),
        (OPEN_MPI | {"JAX_COORDINATOR_PORT": "5000"}, open_mpi("10.96.0.1", 5000)),
        # what has a whole address has its port
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "ib0:7", "JAX_COORDINATOR_PORT": "5000"},
         open_mpi("ib0", 7)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, Processes()),
        ({"DFLOP_DEVICES_PER_PROCESS": "3"}, Processes(devices_per_process=3)),
        ({"DFLOP_COORDINATOR": "", "DFLOP_NUM_PROCESSES": ""}, Processes()),
    ],
)  # fmt: skip
def test_processes_are_found(environment, values, found):
    environment(values)
    assert find_processes(DistributedConfig()) == found
    assert find_processes(FLAGS).source == "distributed"  # flags win


def test_open_mpi_5_needs_to_be_told_the_coordinator(environment, monkeypatch):
    monkeypatch.setenv("OMPI_VERSION", "5.0.1")
    environment({k: v for k, v in OPEN_MPI.items() if k.startswith("OMPI_COMM")})
    with pytest.raises(ValueError, match="-x JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        find_processes(DistributedConfig())
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node1:29400")
    assert find_processes(DistributedConfig()) == Processes(4, 2, AT, "Open MPI", 2)


class _Cluster:
    """What jax's detection of Kubernetes says, without a cluster."""

    number = 3

    @staticmethod
    def is_env_present():
        return True

    @classmethod
    def get_process_count(cls):
        if cls.number == 0:
            raise RuntimeError("Kubernetes API Error: 403\nIt appears that\nyou may not")
        return cls.number

    @staticmethod
    def get_coordinator_address(timeout_secs, override_coordinator_port):
        return f"pod-0.svc:{override_coordinator_port or 55527}"


def test_kubernetes(environment, monkeypatch, caplog):
    environment(POD)
    assert find_processes(DistributedConfig()) == Processes()  # without the package
    assert "trains alone: to train with the others, set DFLOP_COORDINATOR" in caplog.text
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr("jax._src.clusters.K8sCluster", _Cluster)
    expected = Processes(3, 1, Address("pod-0.svc", 55527), "Kubernetes", 1)
    assert find_processes(DistributedConfig()) == expected
    monkeypatch.setattr(_Cluster, "number", 1)
    assert find_processes(DistributedConfig()) == Processes()
    monkeypatch.setattr(_Cluster, "number", 0)
    with pytest.raises(ValueError, match=r"403 It appears that you may not.*set DFLOP_COORD"):
        find_processes(DistributedConfig())
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    assert find_processes(DistributedConfig()) == Processes()
