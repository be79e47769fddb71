"""The context of a run: devices, model and data of a configuration, the other processes, and the
cache of compiled programs."""

from __future__ import annotations

import importlib
import inspect
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler

from dflop_jax.config import Config, ModelConfig, TrainConfig, check_warmup
from dflop_jax.contract import MultimodalModel, chip_of
from dflop_jax.data import MediaSpec, Source, make_source
from dflop_jax.distributed.devices import connect_process_pairs
from dflop_jax.distributed.hang_watch import Sections
from dflop_jax.distributed.initialize import initialize, run_devices
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.folders import writable_path
from dflop_jax.hardware import find_hardware
from dflop_jax.records import PLANNED_SHARE, Hardware
from dflop_jax.report.wall_time import CONNECT, DATA, EVALUATION, SAVE, TRAINING, TimeLog
from dflop_jax.train.optimizer import (
    TrainedParts,
    configure_model,
    find_trained_parts,
    require_method,
)
from dflop_jax.train.run_dir import resolve_run_dir

_USER_CACHE_DIR: str | None = jax.config.values["jax_compilation_cache_dir"]  # as the user set it
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_TRIAL_STEPS = 8  # two warm up; the median of six has a standard error of 2% if steps vary by 4%
_MIN_STEPS_WITH_TRIALS = 200  # so that trials of three plans take at most an eighth of the steps
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_cache(folder: str | Path) -> None:
    """Store compiled programs in `folder`, or in JAX_COMPILATION_CACHE_DIR if that is set."""
    cache_dir = _USER_CACHE_DIR or str(Path(folder).resolve() / "xla")
    jax.config.update("jax_compilation_cache_dir", cache_dir)
    # Stores quick ones too: a run starts with dozens, which take seconds in all.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compiler._cache_write = _cache_write  # type: ignore[assignment]


def _cache_write(
    key: str, compile_s: float, name: str, backend: Any, executable: Any, *_: object
) -> None:
    """Replace jax's own function, which stores only programs that process 0 compiled."""
    min_seconds: float = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    if compile_s >= min_seconds:
        put: Callable[..., None] = compilation_cache.put_executable_and_time
        with suppress(OSError):  # a full disk only slows the next run down
            put(key, name, executable, backend, int(compile_s))


@dataclass
class CompileCounts:
    compiled: int = 0
    cache_hits: int = 0


@contextmanager
def count_compiles() -> Iterator[CompileCounts]:
    """Count the programs that this process compiles or finds in the cache inside the context."""
    counts = CompileCounts()

    def on_event(event: str, **_: str | int) -> None:
        counts.cache_hits += event == _CACHE_HIT_EVENT

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        counts.compiled += event == _COMPILE_EVENT

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_duration)


def select_devices(n: int) -> list[jax.Device]:
    """Return the first `n` devices, or all if 0, simulated on CPU; ValueError if fewer exist."""
    if n > 0:
        with suppress(RuntimeError):  # devices are already initialized
            jax.config.update("jax_num_cpu_devices", n)
    devices = jax.devices()
    if n > len(devices):
        raise ValueError(
            f"plan.devices={n} but only {len(devices)} {devices[0].platform} devices exist; lower "
            "it (0: all)"
        )
    return devices[:n] if n else devices


def import_object(flag: str, path: str) -> Callable[..., Any]:
    """Return the object that an import path MODULE:FUNCTION names."""
    module, _, function = path.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        text = f"{flag}={path!r}: {e}; give MODULE:FUNCTION, importable from the current folder"
        raise ValueError(text) from None


def build_model(config: ModelConfig) -> MultimodalModel:
    """Return the model that `config.factory` (MODULE:FUNCTION) builds; ValueError if it cannot."""
    factory = import_object("model.factory", config.factory)
    kernel = config.attention_kernel
    if kernel == "auto":
        return factory(config.size, config.dtype)  # such a factory needs no argument for kernels
    if "attention_kernel" not in inspect.signature(factory).parameters:
        raise ValueError(
            f"model.attention_kernel={kernel}: {config.factory} has no kernels; leave it at auto"
        )
    return factory(config.size, config.dtype, attention_kernel=kernel)


MIN_FP8_CAPABILITY = 89  # compute capability of GPUs with FP8 products


def build_trained_model(config: Config, chip: str = "") -> MultimodalModel:
    """Return the model of a configuration with its adapters and loss terms; ValueError if it cannot
    be built, or a given chip cannot run its attention kernel or products."""
    kernel = config.model.attention_kernel
    if chip and kernel in ("cudnn", "pallas") and not chip.startswith("sm_"):
        raise ValueError(
            f"model.attention_kernel={kernel} needs a GPU, the devices are {chip}; leave it at auto"
        )
    model = build_model(config.model)
    if config.model.matmul == "fp8":
        if chip.startswith("sm_") and int(chip.removeprefix("sm_")) < MIN_FP8_CAPABILITY:
            raise ValueError(f"model.matmul=fp8 needs a Hopper GPU or newer, not {chip}; leave it")
        model = require_method(model, "with_fp8()", "model.matmul=fp8")()
    return configure_model(model, config.train)


@dataclass(frozen=True)
class RunContext:
    """Everything that all stages of a run need."""

    config: Config
    model: MultimodalModel
    devices: list[jax.Device]
    peers: ProcessGroup
    hardware: Hardware | None = None  # of the devices to plan for, if these are not available
    hosts: tuple[str, ...] = ()  # host of each process; () for one process
    time_log: TimeLog = field(default_factory=TimeLog)
    sections: Sections = field(default_factory=Sections)  # progress of the main thread

    @property
    def n_devices(self) -> int:
        return self.config.plan.devices if self.hardware else len(self.devices)

    @property
    def token_multiple(self) -> int:
        """Token capacities are multiples of this."""
        kind = self.hardware.name if self.hardware else self.devices[0].platform
        return 32 if kind == "cpu" else 128

    @property
    def bytes_limit(self) -> int:
        """Bytes of a local device that jax may use; 0 if unknown (CPU)."""
        local_devices = [d for d in self.devices if d.process_index == jax.process_index()]
        stats = local_devices[0].memory_stats() if local_devices else None
        return (stats or {}).get("bytes_limit", 0)

    @property
    def plannable_bytes(self) -> float:
        """Bytes of a device that a plan may fill; 0 if unknown (CPU)."""
        if stated := self.config.plan.memory_bytes:
            return stated
        return self.hardware.plannable_bytes if self.hardware else PLANNED_SHARE * self.bytes_limit

    @property
    def node(self) -> int:
        """Devices of a node: as configured, or of the hardware to plan for, or of this host."""
        if stated := self.config.plan.node:
            return stated
        if self.hardware:
            return self.hardware.devices_per_node
        return max(map(len, self.by_host))

    @property
    def by_host(self) -> list[list[jax.Device]]:
        """The devices of every host."""
        devices: dict[str, list[jax.Device]] = {}
        for d in self.devices:
            host = self.hosts[d.process_index] if self.hosts else ""
            devices.setdefault(host, []).append(d)
        return list(devices.values())

    @property
    def trained(self) -> TrainedParts:
        """The parts of the model that are trained, and their learning rates."""
        return find_trained_parts(self.config.train, self.model)

    def source(self, split: str = "train") -> Source:
        """Open the dataset for the model's media and tokens; runs on all processes together."""
        if factory := self.config.data.factory or getattr(self.model, "data_factory", ""):
            return import_object("data.factory", factory)(self.config.data, self.model, split)
        spec = MediaSpec.of(self.model.preprocessing, self.model.piece_tokens)
        train, barrier_name = self.config.train, split
        data, n_held_out = self.config.data, float(train.eval_fraction) or train.eval_samples
        if data.eval_path:  # all of it is held out, and all of data.path trains
            if split == "eval":
                data = replace(data, path=data.eval_path, loss_on_prompts=False)
            split, n_held_out = "train", 0
        open_source = partial(
            make_source,
            data,
            spec,
            split,
            n_held_out=n_held_out,
            vocab_size=self.model.vocab_size,
            index_dir=self.config.cache_dir,
        )
        if not data.path:  # generated scenes have no index
            return open_source()
        # The other processes find the index that process 0 makes.
        primary_source = open_source() if self.peers.is_primary else None
        self.peers.barrier(f"source/{barrier_name}")
        return primary_source or open_source(check_media=False)


def with_step_count(context: RunContext, n_samples: int) -> RunContext:
    """Limit the batch to the available samples, and convert `train.epochs` to steps; the last step
    is filled with samples of the next epoch. ValueError if a given warm-up is longer."""
    train = context.config.train
    batch, steps = min(train.global_batch, n_samples), train.steps
    if train.epochs:
        steps = max(1, ceil(train.epochs * n_samples / batch))
        if not train.warmup_ratio and train.warmup_steps != TrainConfig.warmup_steps:
            check_warmup(replace(train, steps=steps))
    train = replace(train, steps=steps, epochs=0.0, global_batch=batch)
    return replace(context, config=replace(context.config, train=train))


def trial_steps(config: Config) -> int:
    """Return the steps of a trial of a plan: `plan.trials`, or the default for the run; 0: none."""
    plan, is_long = config.plan, config.train.steps >= _MIN_STEPS_WITH_TRIALS
    if plan.trials >= 0:
        return plan.trials
    return _TRIAL_STEPS if is_long and plan.policy == "auto" and config.checkpoint.saves else 0


def make_run_context(config: Config, *, resume: bool = False) -> RunContext:
    """Find the devices, build the model, set up the compilation cache and connect the processes;
    ValueError if that fails. `resume`: "{time}" in `run_dir` means the newest run."""
    if config.plan.hardware:
        return _make_planning_context(config)
    with writable_path(config.cache_dir, "choose another --cache_dir") as cache:
        cache.mkdir(exist_ok=True)
    use_cache(config.cache_dir)
    time_log = TimeLog()
    with time_log.track(CONNECT):
        n, distributed = config.plan.devices, config.distributed
        peers = initialize(distributed, n)
        is_single = peers.n_processes == 1
        devices = select_devices(n) if is_single else run_devices(peers.n_processes, n)
        if not is_single and devices[0].platform == "cpu":
            connect_process_pairs(tuple(devices), peers)
    config = replace(config, run_dir=resolve_run_dir(config.run_dir, peers, resume=resume))
    model = build_trained_model(config, chip_of(devices[0]))
    repeated_sections = (TRAINING, DATA, SAVE, EVALUATION)
    sections = Sections(distributed.hang_factor, distributed.hang_min_s, repeated_sections)
    time_log.on_category = sections.begin
    hosts = tuple(peers.all_gather("hosts", socket.gethostname(), str))
    context = RunContext(config, model, devices, peers, None, hosts, time_log, sections)
    assert context.trained.rates  # raises for a stage or rates that the model does not have
    return context


def _make_planning_context(config: Config) -> RunContext:
    """Return a context for planning only; no device is used."""
    jax.config.update("jax_platforms", "cpu")  # a GPU's plugin would need a driver
    hardware = find_hardware(config.plan.hardware)
    if config.plan.devices < 1:
        raise ValueError(
            f"plan.devices=0 on {hardware.name}: say how many devices to plan for (a node has "
            f"{hardware.devices_per_node})"
        )
    if config.plan.node:
        hardware = replace(hardware, devices_per_node=config.plan.node)
    peers = ProcessGroup()
    config = replace(config, run_dir=resolve_run_dir(config.run_dir, peers, resume=False))
    return RunContext(config, build_trained_model(config, hardware.chip), [], peers, hardware)
