"""Checks this host for a run: devices, drivers, links, versions, memory, folders and launcher; and
checks the configured model."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import constants

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
TOOL_TIMEOUT_S = 3.0  # a slower tool is ignored


@dataclass(frozen=True)
class Fact:
    """A finding about one subject; `wrong`: a run would fail because of it."""

    name: str
    value: str
    wrong: bool = False


def environment_facts(config: Config) -> list[Fact]:
    """Return the facts about this process's host."""
    return [
        *_try_fact("devices", _devices, config),
        *_try_fact("driver", _driver),
        *_try_fact("links", _links),
        *_try_fact("versions", _versions),
        *_try_fact("memory", _memory),
        *_try_fact("cache_dir", _folder, config.cache_dir, "--cache_dir"),
        *_try_fact("hub's cache", _folder, str(constants.HF_HUB_CACHE), "HF_HOME"),
        *_try_fact("launcher", _launcher, config),
    ]


def _try_fact(name: str, read_fact: Callable[..., str], *args: Any) -> list[Fact]:
    """Return the fact in a list, none if it is empty, or the error as a wrong fact."""
    try:
        text = read_fact(*args)
    except (ValueError, RuntimeError, OSError) as e:
        return [Fact(name, " ".join(str(e).split()), wrong=True)]
    return [Fact(name, text)] if text else []


def _devices(config: Config) -> str:
    if config.plan.hardware:
        hardware = find_hardware(config.plan.hardware)
        return f"{config.plan.devices} x {hardware.name} to plan for, not on this host"
    devices = select_devices(config.plan.devices)
    kinds = Counter(d.device_kind for d in devices)
    text = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return f"{text}, {limit / GIB:.1f} GiB of each for jax" if limit else text


def _driver() -> str:
    return DRIVER.read_text().splitlines()[0] if DRIVER.exists() else ""


def _links() -> str:
    """Return the number of GPU pairs per link type of nvidia-smi."""
    with suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(LINKS, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
        words = [w for row in run.stdout.splitlines() if row.startswith("GPU") for w in row.split()]
        kinds = Counter(w for w in words if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", w))
        return ", ".join(f"{kind}: {n // 2} pairs" for kind, n in kinds.items())
    return ""


def _versions() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return ", ".join([f"python {platform.python_version()}", *versions])


def _memory() -> str:
    page, cores = os.sysconf("SC_PAGE_SIZE") / GIB, len(os.sched_getaffinity(0))
    size, free = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return f"{size:.1f} GiB on the host, {free:.1f} free; {cores} cores for this process"


def _folder(folder: str, remedy: str) -> str:
    """Return a folder and its free space as text. ValueError: it cannot be written."""
    path = Path(folder).absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{folder}: cannot be written; choose another by {remedy}")
    return f"{folder}, {shutil.disk_usage(existing).free / GB:.0f} GB free"


def _launcher(config: Config) -> str:
    processes = find_processes(config.distributed)
    if processes.n_processes == 1:
        return "none: one process"
    process = f"process {processes.index} of {processes.n_processes}"
    return f"{processes.source}: {process}, coordinator {processes.coordinator}"


def model_facts(config: Config) -> tuple[MultimodalModel | None, list[Fact]]:
    """Return the model, None if it cannot be built, and facts about it and its weights."""
    try:
        hardware = find_hardware(config.plan.hardware) if config.plan.hardware else None
        devices = [] if hardware else select_devices(config.plan.devices)
        chip = hardware.chip if hardware else chip_of(devices[0])
        model = build_trained_model(config, chip)
        workplace = RunContext(config, model, devices, ProcessGroup(), hardware)
        need = min_state_bytes(workplace)
    except ValueError as e:
        return None, [Fact("model", str(e), wrong=True)]
    sizes = {m: sum(parameter_counts(module).values()) for m, module in model.modules.items()}
    text = ", ".join(f"{m} {number(n / 1e6)} M" for m, n in sizes.items())
    facts = [
        Fact("model", f"{config.model.factory} {config.model.size}: parameters {text}"),
        *_try_fact("weights", _weights, model, config.model.weights),
    ]
    limit, n = workplace.plannable_bytes, max(1, workplace.n_devices)
    need_text = f"at least {number(need / GIB)} GiB per device for state, split over {n}"
    limit_text = f"; a plan may use {number(limit / GIB)} GiB" if limit else ""
    is_wrong = bool(limit) and need > limit
    return model, [*facts, Fact("needs", need_text + limit_text, is_wrong)]


def _weights(model: MultimodalModel, weights: Sequence[str]) -> str:
    """Return the size and folders of complete weights. ValueError: they do not match the model."""
    if not weights:
        return "none: random initialization"
    make_initializer(model, weights)
    folders = [Path(w.rpartition("=")[2]) for w in weights]
    n_bytes = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    return f"complete, {n_bytes / GB:.2f} GB in {', '.join(map(str, folders))}"
