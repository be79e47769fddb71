"""What a process of a run uses of its host: devices, told to jax before jax starts, and memory.

And what XLA and NCCL then read from the environment, where the user says nothing; see
`docs/clusters.md` for the reasons.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Callable, Mapping
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


def devices_each(processes: Processes, plan_devices: int) -> int:
    """Devices of each process; 0 for all it has.

    Raises:
      ValueError: the plan's devices are not what the processes have, or cannot be shared evenly.
    """
    number, each = processes.number, processes.devices_each
    if each and plan_devices not in (0, number * each):
        raise ValueError(
            f"plan.devices={plan_devices}, but {number} processes of {each} devices have "
            f"{number * each}; give --plan.devices {number * each}, or 0"
        )
    if plan_devices % number:
        raise ValueError(
            f"plan.devices={plan_devices} cannot be shared evenly by {number} processes; give a "
            f"multiple of {number}, or 0 for all devices"
        )
    return each or plan_devices // number


def limit_devices(processes: Processes, each: int) -> None:
    """Let jax use this process's devices only: CPU devices by number, GPUs by their place."""
    if each:
        jax.config.update("jax_num_cpu_devices", each)
    if not on_cpu() and (ids := gpu_share(processes, each)) is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, ids)))


def jax_has_started() -> bool:
    """Whether jax has begun to use devices, after which it takes no other number of them."""
    settings: Any = jax.config  # the types of some versions of jax know this name, others do not
    number: int = settings.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


def on_cpu() -> bool:
    """Whether jax will compute on the CPU; asking jax itself would start it."""
    settings: Any = jax.config
    platforms: str | None = settings.jax_platforms
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return importlib.util.find_spec("jax_plugins") is None or not visible_gpus()


def visible_gpus() -> int:
    """GPUs of this host that processes may use, by CUDA_VISIBLE_DEVICES or the device files."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])


def gpu_share(processes: Processes, each: int) -> list[int] | None:
    """Places of this process's GPUs among the visible ones; None for all of them.

    Where the processes of a host are counted, each gets an equal part, of which `each` are used.

    Raises:
      ValueError: there are not enough.
    """
    n_gpus, local = visible_gpus(), max(1, processes.local_number)
    if n_gpus == 1 and local > 1 and processes.source != "dflop launch":
        return None  # the cluster shows each process its own
    part = n_gpus // local
    if part < max(1, each):
        raise ValueError(
            f"{local} processes on this host need {max(1, each)} GPUs each, {n_gpus} are there: "
            "start fewer"
        )
    start = processes.local_index * part
    return list(range(start, start + (each or part)))


@cache
def connect_pairs(devices: tuple[jax.Device, ...], peers: ProcessGroup) -> None:
    """Have jax connect every two processes for transfers between CPUs, both ways, once; all of them
    call this.

    A process listens from the first array that it sends, and who looks for it before that looks
    again only after 2 s. So each sends before the others receive. jax counts transfers, hence
    every process takes part in every one, also where it neither sends nor receives.
    """
    firsts = {d.process_index: d for d in reversed(devices)}
    arrived = []
    for source in sorted(firsts):
        if source != peers.process:
            peers.barrier(f"sent/{source}")
        zero = np.zeros(1, np.float32)
        sent = jax.make_array_from_single_device_arrays(
            zero.shape,
            SingleDeviceSharding(firsts[source]),
            [jax.device_put(zero, firsts[source])] if source == peers.process else [],
            dtype=zero.dtype,
        )
        for target in sorted(firsts.keys() - {source}):
            arrived.append(jax.device_put(sent, SingleDeviceSharding(firsts[target])))
        if source == peers.process:
            peers.barrier(f"sent/{source}")
    jax.block_until_ready(arrived)


CPU_FLAGS = {"xla_cpu_use_fusion_emitters": "false", "xla_backend_optimization_level": "1"}
GPU_FLAGS = {
    "xla_gpu_shard_autotuning": "false",
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
VARIABLES = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
# Two names of one setting, of which jax takes only one at a time.
MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def prepare() -> None:
    """Set this process's environment before jax starts; does nothing when it is too late."""
    if not jax_has_started():
        settings = cpu_settings if on_cpu() else gpu_settings
        os.environ.update(settings(os.environ, xla_knows))


def gpu_settings(environment: Mapping[str, str], knows: Callable[[str], bool]) -> dict[str, str]:
    """Variables to set beside those of `environment`, whose own settings stay.

    Args:
      knows: whether XLA has a flag; one that it has not would end the process.
    """
    settings = {k: v for k, v in VARIABLES.items() if k not in environment}
    if not any(name in environment for name in MEMORY_FRACTION):
        settings[MEMORY_FRACTION[0]] = str(USABLE_MEMORY)
    return settings | cpu_settings(environment, knows, GPU_FLAGS)


def cpu_settings(
    environment: Mapping[str, str],
    knows: Callable[[str], bool],
    flags: Mapping[str, str] = CPU_FLAGS,
) -> dict[str, str]:
    """`gpu_settings` of a process that computes on the CPU: flags alone."""
    given = environment.get("XLA_FLAGS", "")
    named = {word.lstrip("-").partition("=")[0] for word in given.split()}
    ours = [f"--{k}={v}" for k, v in flags.items() if k not in named and knows(k)]
    # XLA takes the last of two values, so ours come first.
    return {"XLA_FLAGS": " ".join([*ours, given]).strip()} if ours else {}


def xla_knows(flag: str) -> bool:
    """Whether every library here that reads XLA_FLAGS has the flag.

    A name that stands alone between two zeros is a flag; those that are no more so only stand in
    the description of a message.
    """
    for package, names in (("jaxlib", "libjax_common.so"), ("jax_plugins", "*/xla_*plugin.so")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for library in Path(folder).glob(names):
                with library.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as text:
                    if text.find(b"\0" + flag.encode() + b"\0") < 0:
                        return False
    return True


MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of this process, where it is in a container of its own


def free_bytes() -> int | None:
    """Bytes that programs can still take, of the host or of the container that this process is in;
    None where nobody says how many."""
    known = []
    if MEMORY.exists():
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        known.append(1024 * int(lines["MemAvailable"].split()[0]))
    with suppress(OSError, ValueError):  # no group, or one without a limit ("max")
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        known.append(max(0, limit - used + int(stat["inactive_file"])))
    return min(known, default=None)
