"""What XLA and NCCL read from the environment when jax starts, where the user says nothing.

`docs/clusters.md` gives the reason of each setting.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from dflop_jax.cluster.devices import jax_has_started, on_cpu
from dflop_jax.records import USABLE_MEMORY

CPU_FLAGS = {"xla_cpu_use_fusion_emitters": "false", "xla_backend_optimization_level": "1"}
GPU_FLAGS = {
    "xla_gpu_shard_autotuning": "false",
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
INTERFACE = "NCCL_SOCKET_IFNAME"
VARIABLES = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
# Two names of one setting, of which jax takes only one at a time.
MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def prepare() -> None:
    """Set this process's environment before jax starts; does nothing when it is too late."""
    if not jax_has_started():
        settings = cpu_settings if on_cpu() else gpu_settings
        os.environ.update(settings(os.environ, xla_knows))


def cpu_settings(environment: Mapping[str, str], knows: Callable[[str], bool]) -> dict[str, str]:
    """`gpu_settings` of a process that computes on the CPU."""
    return _with_flags(environment, CPU_FLAGS, knows)


def gpu_settings(environment: Mapping[str, str], knows: Callable[[str], bool]) -> dict[str, str]:
    """Variables to set beside those of `environment`, whose own settings stay.

    Args:
      knows: whether XLA has a flag; one that it has not would end the process.
    """
    settings = {k: v for k, v in VARIABLES.items() if k not in environment}
    if not any(name in environment for name in MEMORY_FRACTION):
        settings[MEMORY_FRACTION[0]] = str(USABLE_MEMORY)
    return settings | _with_flags(environment, GPU_FLAGS, knows)


def network_settings(environment: Mapping[str, str], *, one_host: bool) -> dict[str, str]:
    """Where NCCL listens: on loopback where all processes are on one host, which nobody else then
    reaches."""
    return {INTERFACE: "lo"} if one_host and INTERFACE not in environment else {}


def _with_flags(
    environment: Mapping[str, str], flags: Mapping[str, str], knows: Callable[[str], bool]
) -> dict[str, str]:
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
    return all(_holds(library, b"\0" + flag.encode() + b"\0") for library in _libraries())


def _libraries() -> list[Path]:
    libraries: list[Path] = []
    for package, names in (("jaxlib", "libjax_common.so"), ("jax_plugins", "*/xla_*plugin.so")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            libraries += Path(folder).glob(names)
    return libraries


def _holds(file: Path, text: bytes) -> bool:
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0
