"""Descriptions of absent GPUs for XLA's compiler, and JAX device objects for them.

Sizes are from the vendor's data sheets and tuning guides; memory and its bandwidth are from
`dflop_jax.hardware`. The compiler uses them to choose tile sizes and to order the program.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.experimental import topologies

from dflop_jax.distributed.devices import xla_environment
from dflop_jax.records import Hardware

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_INSTALL_HINT = "install it with pip install -e '.[gpu-compile]' (or dflop_jax[gpu-compile])"

# XLA needs the versions of the driver, the toolkit and cuDNN on the target machine.
_CUDA, _DRIVER, _CUDNN = "12.8.0", "13.0.0", (9, 10, 0)


@dataclass(frozen=True)
class Chip:
    """Description of a GPU for the compiler, besides its memory."""

    device: str  # name that drivers report
    capability: tuple[int, int]  # compute capability
    accelerated: bool  # use architecture-specific features, such as sm_90a
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units per core
    shared_bytes: int  # shared memory per core; a block may use all but 1 KiB
    l2_bytes: int  # L2 cache
    clock_ghz: float  # boost clock


_A100 = Chip("NVIDIA A100-SXM4-40GB", (8, 0), False, 108, 64, 164 * 2**10, 40 * 2**20, 1.41)
_H100 = Chip("NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 228 * 2**10, 50 * 2**20, 1.98)
CHIPS = {
    "a100-40": _A100,
    "a100-80": replace(_A100, device="NVIDIA A100-SXM4-80GB"),
    "h100": _H100,
    "h200": replace(_H100, device="NVIDIA H200"),
}


def find_chip(name: str) -> Chip:
    """Return the chip with a name of `dflop_jax.hardware`; ValueError lists the known chips."""
    chip = CHIPS.get(name.strip().lower())
    if chip is None:
        raise ValueError(f"no programs can be compiled for {name!r}; known: {', '.join(CHIPS)}")
    return chip


def target_config(chip: Chip, hardware: Hardware) -> str:
    """Return a chip's description as the text of XLA's GpuTargetConfigProto."""
    major, minor = chip.capability
    feature = "feature_extension: ACCELERATED_FEATURES" if chip.accelerated else ""
    cudnn = ".".join(map(str, _CUDNN))
    return f"""
gpu_device_info {{
  name: "{chip.device}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{"a" * chip.accelerated}"
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  core_count: {chip.cores}
  fpus_per_core: {chip.lanes}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {hardware.memory_bytes:.0f}
  memory_bandwidth: {hardware.memory_bandwidth:.0f}
  l2_cache_size: {chip.l2_bytes}
  shared_memory_per_core: {chip.shared_bytes}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {chip.shared_bytes - 2**10}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  pcie_bandwidth: {32 * 2**30}
  ecc_enabled: true
  driver_version: "{_DRIVER}"
  runtime_version: "{_CUDA}"
  compile_time_toolkit_version: "{_CUDA}"
  dnn_version: "{cudnn}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
device_description_str: "{chip.device}"
"""


def absent_devices(hardware: Hardware, n_devices: int) -> list[jax.Device]:
    """Return `n_devices` devices of a chip to compile for, with one process per node."""
    name, per_node = hardware.name, min(n_devices, hardware.devices_per_node)
    if n_devices % per_node:
        raise ValueError(
            f"plan.devices={n_devices} does not fill nodes of {per_node} {name}; give a multiple"
        )
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=name,
        topology=f"1x{n_devices // per_node}x{per_node}",
        target_config=target_config(find_chip(name), hardware),
    )
    return list(topology.devices)


def compiler_environment() -> dict[str, str]:
    """Return this process's environment, changed so that JAX loads the GPU compiler but no driver.

    Matrix products use cuBLAS, since XLA autotunes Triton products on the device and some shapes
    fail without autotuning. Flags that the user has set take precedence. ValueError if the compiler
    is not installed; the message says how to install it.
    """
    if not any(_is_installed(name) for name in _PLUGINS):
        raise ValueError(f"compiling for an absent GPU needs jax's CUDA plugin; {_INSTALL_HINT}")
    folder = _cuda_folder()
    if folder is None:
        raise ValueError(f"compiling for an absent GPU needs ptxas; {_INSTALL_HINT}")
    flags = (
        f"--xla_gpu_cuda_data_dir={folder}",
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_gpu_autotune_level=0",
        # Flags that a run on GPUs sets, and the user's flags.
        {**os.environ, **xla_environment(os.environ, on_gpus=True)}.get("XLA_FLAGS", ""),
    )
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    return {**os.environ, **quiet, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags).strip()}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing, too
        return False


def _cuda_folder() -> Path | None:
    """Return a folder with bin/ptxas, from NVIDIA's wheels for CUDA 12 or 13 or from PATH."""
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or ()) if package else ():
        for name in ("cuda_nvcc", "cu12", "cu13"):
            if (Path(root) / name / "bin" / "ptxas").is_file():
                return Path(root) / name
    ptxas = shutil.which("ptxas")
    return Path(ptxas).resolve().parent.parent if ptxas else None
