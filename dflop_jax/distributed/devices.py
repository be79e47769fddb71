"""Devices and memory of a process on its host, and default environment variables for XLA and NCCL;
`docs/clusters.md` has the reasons.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.processes import Processes
from dflop_jax.records import USABLE_MEMORY


def devices_per_process(processes: Processes, plan_devices: int) -> int:
    """Return the number of devices of each process (0: all that it has); ValueError if the plan's
    devices contradict that of the processes, or cannot be shared evenly."""
    n_processes, n_each = processes.n_processes, processes.devices_per_process
    if n_each and plan_devices not in (0, n_processes * n_each):
        raise ValueError(
            f"plan.devices={plan_devices}, but {n_processes} processes of {n_each} devices have "
            f"{n_processes * n_each}; give --plan.devices {n_processes * n_each}, or 0"
        )
    if plan_devices % n_processes:
        raise ValueError(
            f"plan.devices={plan_devices} cannot be shared evenly by {n_processes} processes; give "
            f"a multiple of {n_processes}, or 0 for all devices"
        )
    return n_each or plan_devices // n_processes


def limit_devices(processes: Processes, n_devices: int) -> None:
    """Limit jax to this process's devices: a number of CPU devices, or GPUs by index."""
    if n_devices:
        jax.config.update("jax_num_cpu_devices", n_devices)
    if not uses_cpu() and (ids := local_gpu_ids(processes, n_devices)) is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, ids)))


def is_jax_initialized() -> bool:
    """Return whether jax has initialized its devices, which fixes their number."""
    settings: Any = jax.config  # only some versions of jax declare the type of this name
    number: int = settings.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


def uses_cpu() -> bool:
    """Return whether jax will compute on the CPU, without initializing jax."""
    settings: Any = jax.config
    platforms: str | None = settings.jax_platforms
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return importlib.util.find_spec("jax_plugins") is None or not count_visible_gpus()


def count_visible_gpus() -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES or, if unset, in this host's /dev."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])


def local_gpu_ids(processes: Processes, n_devices: int) -> list[int] | None:
    """Return the indices of this process's GPUs among the visible ones; None: all. The processes of
    the host get equal parts, and use `n_devices` each (0: all). ValueError for too few GPUs."""
    n_gpus, n_local = count_visible_gpus(), max(1, processes.n_local)
    if n_gpus == 1 and n_local > 1 and processes.source != "dflop launch":
        return None  # the cluster shows each process its own
    n_share = n_gpus // n_local
    if n_share < max(1, n_devices):
        raise ValueError(
            f"{n_local} processes on this host need {max(1, n_devices)} GPUs each, but it has "
            f"{n_gpus}: start fewer"
        )
    start = processes.local_index * n_share
    return list(range(start, start + (n_devices or n_share)))


@cache
def connect_process_pairs(devices: tuple[jax.Device, ...], peers: ProcessGroup) -> None:
    """Connect every two processes for transfers between CPUs, once; all processes call this.

    A process listens only once it has sent an array. A process that tries to connect earlier
    retries after 2 s, so each process sends before the others receive. jax counts transfers, so
    every process takes part in each, even if it neither sends nor receives.
    """
    first_devices = {d.process_index: d for d in reversed(devices)}
    received = []
    for source in sorted(first_devices):
        if source != peers.process_index:
            peers.barrier(f"sent/{source}")
        zero = np.zeros(1, np.float32)
        array = jax.make_array_from_single_device_arrays(
            zero.shape,
            SingleDeviceSharding(first_devices[source]),
            [jax.device_put(zero, first_devices[source])] if source == peers.process_index else [],
            dtype=zero.dtype,
        )
        for target in sorted(first_devices.keys() - {source}):
            received.append(jax.device_put(array, SingleDeviceSharding(first_devices[target])))
        if source == peers.process_index:
            peers.barrier(f"sent/{source}")
    jax.block_until_ready(received)


CPU_FLAGS = {"xla_cpu_use_fusion_emitters": "false", "xla_backend_optimization_level": "1"}
GPU_FLAGS = {
    "xla_gpu_shard_autotuning": "false",
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # One product for queries, keys and values saves less than taking its result apart costs.
    "xla_gpu_dot_merger_threshold_mb": "0",
}
NCCL_VARIABLES = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
# Two names of one setting; jax accepts only one at a time.
MEMORY_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def set_xla_environment() -> None:
    """Set XLA's and NCCL's variables for this process; does nothing once jax is initialized."""
    if not is_jax_initialized():
        os.environ.update(xla_environment(os.environ, on_gpus=not uses_cpu()))


def xla_environment(environment: Mapping[str, str], *, on_gpus: bool) -> dict[str, str]:
    """Return the variables to add to `environment`; its own settings take precedence."""
    settings: dict[str, str] = {}
    flags = GPU_FLAGS if on_gpus else CPU_FLAGS
    if on_gpus:
        settings = {k: v for k, v in NCCL_VARIABLES.items() if k not in environment}
        if not any(name in environment for name in MEMORY_FRACTION_VARIABLES):
            settings[MEMORY_FRACTION_VARIABLES[0]] = str(USABLE_MEMORY)
    user_flags = environment.get("XLA_FLAGS", "")
    user_flag_names = {word.lstrip("-").partition("=")[0] for word in user_flags.split()}
    # An unknown flag would end the process. XLA takes the last of two values, so ours come first.
    new_flags = [
        f"--{k}={v}" for k, v in flags.items() if k not in user_flag_names and is_xla_flag(k)
    ]
    if new_flags:
        settings["XLA_FLAGS"] = " ".join([*new_flags, user_flags]).strip()
    return settings


def is_xla_flag(flag: str) -> bool:
    """Return whether every installed library that reads XLA_FLAGS has the flag: its name between
    two zero bytes. Names of removed flags occur only inside descriptions."""
    for package, pattern in (("jaxlib", "libjax_common.so"), ("jax_plugins", "*/xla_*plugin.so")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for library in Path(folder).glob(pattern):
                with library.open("rb") as f:
                    contents = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
                if contents.find(b"\0" + flag.encode() + b"\0") < 0:
                    return False
    return True


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # this process's group, if it runs in a container


def available_host_bytes() -> int | None:
    """Return the bytes of memory that the host or container has free; None: unknown."""
    candidates = []
    if MEMINFO.exists():
        lines = dict(row.split(":") for row in MEMINFO.read_text().splitlines())
        candidates.append(1024 * int(lines["MemAvailable"].split()[0]))
    with suppress(OSError, ValueError):  # no group, or one without a limit ("max")
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(row.split() for row in (CGROUP / "memory.stat").read_text().splitlines())
        candidates.append(max(0, limit - used + int(stat["inactive_file"])))
    return min(candidates, default=None)
