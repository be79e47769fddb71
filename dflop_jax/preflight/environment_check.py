"""What a run would find here: devices, drivers, links, versions, memory, folders, launcher; and the
model that is named."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel, chip_of
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.processes import find_processes
from dflop_jax.hardware import GB, GIB, find_hardware
from dflop_jax.report.number_format import number
from dflop_jax.train.load_params import make_initializer
from dflop_jax.train.planning import min_state_bytes
from dflop_jax.train.profiling import parameter_counts
from dflop_jax.train.run_context import RunContext, build_trained_model, select_devices

PACKAGES = ("jax", "jaxlib", "flax", "optax", "safetensors", "tokenizers", "huggingface_hub", "av")
DRIVER = Path("/proc/driver/nvidia/version")
LINKS = ("nvidia-smi", "topo", "-m")
TOOL_TIMEOUT_S = 3.0  # a tool that takes longer says nothing


@dataclass(frozen=True)
class Fact:
    """What was found about one subject; `wrong`: a run would fail because of it."""

    name: str
    value: str
    wrong: bool = False


def environment_facts(config: Config) -> list[Fact]:
    """Return what this process finds on its host."""
    return [
        *_try_fact("devices", lambda: _devices(config)),
        *_try_fact("driver", _driver),
        *_try_fact("links", _links),
        Fact("versions", _versions()),
        *_try_fact("memory", _memory),
        *_try_fact("cache_dir", lambda: _folder(config.cache_dir, "--cache_dir")),
        *_try_fact("hub's cache", lambda: _folder(_hub_cache(), "HF_HOME")),
        *_try_fact("launcher", lambda: _launcher(config)),
    ]


def _try_fact(name: str, value: Callable[[], str]) -> list[Fact]:
    """Return the fact, nothing where there is none, or the error as a wrong fact."""
    try:
        text = value()
    except (ValueError, RuntimeError, OSError) as e:
        return [Fact(name, " ".join(str(e).split()), wrong=True)]
    return [Fact(name, text)] if text else []


def _devices(config: Config) -> str:
    if config.plan.hardware:
        hardware = find_hardware(config.plan.hardware)
        return f"{config.plan.devices} x {hardware.name} to plan for, which are not here"
    devices = select_devices(config.plan.devices)
    kinds = Counter(d.device_kind for d in devices)
    text = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
    stats = devices[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        text += f", {limit / GIB:.1f} GiB of each for jax"
    return text


def _driver() -> str:
    return DRIVER.read_text().splitlines()[0] if DRIVER.exists() else ""


def _links() -> str:
    """Return how GPUs are linked, by the link types of nvidia-smi."""
    if shutil.which(LINKS[0]) is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(
            LINKS, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S
        ).stdout
        entries = [
            w for row in output.splitlines() if row.startswith("GPU") for w in row.split()[1:]
        ]
        kinds = Counter(
            w for w in entries if w.startswith("NV") or w in ("PIX", "PXB", "PHB", "NODE", "SYS")
        )
        return ", ".join(f"{kind}: {n // 2} pairs" for kind, n in kinds.items())
    return ""


def _versions() -> str:
    versions = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


def _memory() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names, sizes = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"), []
    with suppress(ValueError, OSError):
        sizes = [os.sysconf(n) * os.sysconf("SC_PAGE_SIZE") / GIB for n in names]
    host = f"{sizes[0]:.1f} GiB of the host, {sizes[1]:.1f} free; " if sizes else ""
    return f"{host}{cores} cores for this process"


def _folder(folder: str, remedy: str) -> str:
    """Return a writable folder and its free space."""
    path = Path(folder).absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{folder}: cannot be written; choose another by {remedy}")
    return f"{folder}, {shutil.disk_usage(existing).free / GB:.0f} GB free"


def _hub_cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _launcher(config: Config) -> str:
    processes = find_processes(config.distributed)
    if processes.n_processes == 1:
        return "none: one process"
    index = f"process {processes.index} of {processes.n_processes}"
    return f"{processes.source}: {index}, meets at {processes.coordinator}"


def model_facts(config: Config) -> tuple[MultimodalModel | None, list[Fact]]:
    """Return the model, None where it cannot be built, and facts about it and its weights."""
    try:
        if config.plan.hardware:
            hardware, devices = find_hardware(config.plan.hardware), []
            chip = hardware.chip
        else:
            hardware, devices = None, select_devices(config.plan.devices)
            chip = chip_of(devices[0])
        model = build_trained_model(config, chip)
        workplace = RunContext(config, model, devices, ProcessGroup(), hardware)
        need = min_state_bytes(workplace)
    except ValueError as e:
        return None, [Fact("model", str(e), wrong=True)]
    sizes = {m: sum(parameter_counts(module).values()) for m, module in model.modules.items()}
    text = ", ".join(f"{m} {number(n / 1e6)} M" for m, n in sizes.items())
    facts = [
        Fact("model", f"{config.model.factory} {config.model.size}: parameters {text}"),
        *_try_fact("weights", lambda: _weights(model, config)),
    ]
    limit, n = workplace.plannable_bytes, max(1, workplace.n_devices)
    need_text = f"{_size(need)} a device at least for state, split over {n}"
    if limit:
        need_text += f"; a plan may fill {_size(limit)}"
    return model, [*facts, Fact("needs", need_text, wrong=bool(limit) and need > limit)]


def _size(n_bytes: float) -> str:
    unit, name = (GIB, "GiB") if n_bytes >= GIB else (2**20, "MiB")
    return f"{number(n_bytes / unit)} {name}"


def _weights(model: MultimodalModel, config: Config) -> str:
    """Return whether the folder holds exactly the model; ValueError names what is missing or
    unknown."""
    weights = config.model.weights
    if not weights:
        return "none: it begins at random"
    make_initializer(model, weights)
    folders = [Path(w.rpartition("=")[2]) for w in weights]
    n_bytes = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    return f"complete, {n_bytes / GB:.2f} GB in {', '.join(map(str, folders))}"
