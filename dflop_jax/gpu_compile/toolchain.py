"""Where XLA's GPU compiler lies, and the environment of a process that compiles without a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflop_jax.cluster.devices import gpu_settings, xla_knows

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_HOW = "pip install -e '.[gpu-compile]' (or dflop_jax[gpu-compile]) brings it"


def compiler_environment() -> dict[str, str]:
    """This process's environment, changed so that jax loads the GPU compiler and no driver.

    Products are left to cuBLAS: XLA's own Triton products are chosen by timing them on the device,
    and for some shapes none fits untimed. Flags that the user has set win.

    Raises:
      ValueError: the compiler is not installed; the message says how to get it.
    """
    if not any(_is_installed(name) for name in _PLUGINS):
        raise ValueError(f"compiling for a GPU that is not here needs jax's CUDA plugin; {_HOW}")
    folder = next(_cuda_folders(), None)
    if folder is None:
        raise ValueError(f"compiling for a GPU that is not here needs ptxas; {_HOW}")
    flags = (
        f"--xla_gpu_cuda_data_dir={folder}",
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_gpu_autotune_level=0",
        # What a run on GPUs sets, and the user's own.
        gpu_settings(os.environ, xla_knows).get("XLA_FLAGS", os.environ.get("XLA_FLAGS", "")),
    )
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    return {**os.environ, **quiet, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags).strip()}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def _cuda_folders() -> Iterator[Path]:
    """Folders with bin/ptxas: of NVIDIA's wheels for CUDA 12 and 13, then of an installed CUDA."""
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or ()) if package else ():
        for name in ("cuda_nvcc", "cu12", "cu13"):
            if (Path(root) / name / "bin" / "ptxas").is_file():
                yield Path(root) / name
    if ptxas := shutil.which("ptxas"):
        yield Path(ptxas).resolve().parent.parent
