"""Everything before the first step: devices, model, profiles and plan, each usable alone."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax._src import compilation_cache, compiler

from dflop_jax.cluster.distributed import Membership, initialise, run_devices
from dflop_jax.cluster.peers import Peers
from dflop_jax.config import Config, ModelConfig, PlanConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import MediaSpec, Source, make_source
from dflop_jax.data.build import uses_index
from dflop_jax.hardware import Hardware, find_hardware
from dflop_jax.profile.measure import model_profile, profile_key, time_layers, together
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.record_files import load, save
from dflop_jax.records import (
    DataProfile,
    LayerTiming,
    ModelProfile,
    ModuleShape,
    Profile,
)
from dflop_jax.train.stages import TrainedParts, adapted, trained_parts

log = logging.getLogger("dflop_jax")
OnProgress = Callable[[int, int], None]
DEGREES = (1, 2, 4, 8)  # of tensor parallelism


def use_devices(n: int) -> list[jax.Device]:
    """The first `n` devices, all for 0; pretends `n` CPU devices where only the CPU is there.

    Raises:
      ValueError: fewer exist.
    """
    if n > 0:
        try:
            jax.config.update("jax_num_cpu_devices", n)
        except RuntimeError:
            log.debug("devices are in use already; their number stays as it is")
    found = jax.devices()
    if n > len(found):
        raise ValueError(
            f"plan.devices={n} but only {len(found)} {found[0].platform} devices exist; lower it "
            "(0 takes all)"
        )
    return found[:n] if n else found


def use_cache(folder: str | Path) -> None:
    """Keep compiled programs in `folder`, so that a second run of the same plan starts at once."""
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).resolve() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    compiler._cache_write = _cache_write  # type: ignore[assignment]


def _cache_write(
    key: str, took_s: float, name: str, backend: Any, executable: Any, *_: object
) -> None:
    """In place of jax's own, which keeps what process 0 compiled only: here every process compiles
    programs of its own."""
    least_s: float = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    if took_s >= least_s:
        with suppress(OSError):  # a full disk costs time in the next run only
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(took_s))


def build_model(config: ModelConfig) -> MultimodalModel:
    """The model that `config.factory` (MODULE:FUNCTION) builds.

    Raises:
      ValueError: no such module or function, or a size or attention kernel that it does not know.
    """
    module, _, function = config.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        raise ValueError(
            f"model.factory={config.factory!r}: {e}; give MODULE:FUNCTION, importable from here"
        ) from None
    kernel = config.attention_kernel
    if kernel == "auto":
        return factory(config.size, config.dtype)  # which need not know of kernels
    if kernel == "pallas" and jax.default_backend() != "gpu":
        raise ValueError(
            f"model.attention_kernel=pallas needs a GPU, jax has {jax.default_backend()}; leave it "
            "at auto"
        )
    if "attention_kernel" not in inspect.signature(factory).parameters:
        raise ValueError(
            f"model.attention_kernel={kernel}: {config.factory} takes none; leave it at auto"
        )
    return factory(config.size, config.dtype, attention_kernel=kernel)


@dataclass(frozen=True)
class Setup:
    """What every stage of a run works on."""

    config: Config
    model: MultimodalModel
    devices: list[jax.Device]
    peers: Peers
    hardware: Hardware | None = None  # what is planned for, where it is not at hand

    @property
    def n_devices(self) -> int:
        return self.config.plan.devices if self.hardware else len(self.devices)

    @property
    def token_multiple(self) -> int:
        """Token capacities are multiples of this: what GPU kernels like, finer on CPU."""
        kind = self.hardware.name if self.hardware else self.devices[0].platform
        return 32 if kind == "cpu" else 128

    @property
    def trained(self) -> TrainedParts:
        """Which parts of the model train, and how fast."""
        return trained_parts(self.config.train, self.model)

    @property
    def eval_fraction(self) -> float:
        """Share of a dataset on disk that is held out: a tenth when evaluation is on."""
        return 0.1 if self.config.train.eval_samples else 0.0

    def source(self, split: str = "train") -> Source:
        """The dataset, as the model wants its media and tokens; for all processes together."""
        spec = MediaSpec.of(self.model.preprocessing)
        make = partial(
            make_source,
            self.config.data,
            spec,
            split,
            eval_fraction=self.eval_fraction,
            vocab_size=self.model.vocab_size,
            index_dir=self.config.cache_dir,
        )
        if not uses_index(self.config.data, spec):
            return make()
        first = make() if self.peers.is_hub else None
        self.peers.barrier(f"source/{split}")  # the others find the index that process 0 made
        return first or make()


def set_up(config: Config) -> Setup:
    """Devices and model of a configuration, with the compilation cache in place; joins the other
    processes of the run, where there are some.

    Raises:
      ValueError: the model cannot be built, has no part that the training stage or the learning
        rates name, or too few devices exist.
    """
    if config.plan.hardware:
        return _set_up_elsewhere(config)
    use_cache(config.cache_dir)
    member = initialise(config.distributed, config.plan.devices)
    n = config.plan.devices
    devices = use_devices(n) if member.number == 1 else run_devices(n, member)
    peers = _peers(member, config.distributed.peer_timeout_s)
    model = adapted(build_model(config.model), config.train)
    setup = Setup(config, model, devices, peers)
    assert setup.trained.rates  # raises for a stage or rates that the model does not have
    return setup


def _set_up_elsewhere(config: Config) -> Setup:
    """For planning only: no device is touched."""
    hardware = find_hardware(config.plan.hardware)
    if config.plan.devices < 1:
        raise ValueError(
            f"plan.devices=0 on {hardware.name}: say how many devices to plan for (a node has "
            f"{hardware.devices_per_node})"
        )
    model = adapted(build_model(config.model), config.train)
    return Setup(config, model, [], _peers(Membership(), 30.0), hardware)


@cache
def _peers(member: Membership, timeout_s: float) -> Peers:
    return Peers(member.index, member.number, member.links, timeout_s=timeout_s)


def profile_data(config: PlanConfig, source: Source) -> DataProfile:
    """Shapes of up to `profile_samples` samples, evenly spread over the dataset."""
    n = min(len(source), config.profile_samples)
    if n == 0:
        raise ValueError(f"{source.name}: the dataset is empty")
    picked = [i * len(source) // n for i in range(n)]
    return DataProfile(source.name, len(source), tuple(source.shape(i) for i in picked))


def profile_shapes(
    data: DataProfile, model: MultimodalModel, multiple: int
) -> dict[str, list[ModuleShape]]:
    """Per-rank shapes worth timing: from a few items to what a large microbatch may hold."""

    def up(value: float) -> int:
        return max(multiple, -(-int(value) // multiple) * multiple)

    longest = up(max(s.llm_tokens for s in data.shapes))
    rows = sorted({up(longest / 4), up(longest), up(longest * 2)})
    shapes = {}
    for m, tokens in model.item_tokens.items():
        most = max(s.load(m) for s in data.shapes)
        counts = {max(1, most // 8), max(2, most // 2), max(3, most), max(4, 2 * most)}
        shapes[m] = [ModuleShape(n, tokens) for n in sorted(counts)]
    shapes["llm"] = [ModuleShape(1, t) for t in rows]
    shapes["llm"] += [ModuleShape(4, rows[0]), ModuleShape(2, longest)]
    return shapes


def profile_model(
    setup: Setup, data: DataProfile, on_progress: OnProgress | None = None
) -> ModelProfile:
    """The model's timings, from the cache when its programs, devices, shapes and versions are the
    same.

    Processes with devices of their own measure a part each, otherwise process 0 all of it; how many
    devices compute at once is measured by all together.
    """
    config, model, peers = setup.config, setup.model, setup.peers
    shapes = profile_shapes(data, model, setup.token_multiple)
    if setup.hardware:
        most = min(config.plan.max_model, setup.hardware.devices_per_node)
        degrees = [d for d in DEGREES if d <= most]
        return roofline_profile(model, setup.hardware, shapes, degrees, n_devices=setup.n_devices)
    devices = [d for d in setup.devices if d.process_index == peers.process]
    # Tensor parallelism stays inside a process.
    degrees = [d for d in DEGREES if d <= min(config.plan.max_model, max(len(devices), 1))]
    known = b""
    if peers.is_hub:
        n = len(setup.devices)
        key = profile_key(model, devices, shapes, config.model, degrees, n, peers.count)
        cached = Path(config.cache_dir) / f"profile-{key}.json"
        if cached.exists():
            known = msgspec.json.encode(load(ModelProfile, cached))
    known = peers.share("profile/cached", known)
    if known:
        return msgspec.json.decode(known, type=ModelProfile)
    apart = _compute_apart(devices, peers)
    timings: list[LayerTiming] = []
    if apart or peers.is_hub:
        part = (peers.process, peers.count) if apart else (0, 1)
        timings = time_layers(model, shapes, degrees, devices, share=part, on_progress=on_progress)
    found = peers.gather("profile/timings", msgspec.json.encode(timings))
    concurrency = _concurrency(model, shapes["llm"][-1], setup.devices, devices, peers)
    profile = None
    if peers.is_hub:
        timings = [t for part in found for t in msgspec.json.decode(part, type=list[LayerTiming])]
        profile = model_profile(model, shapes, timings, devices, key=key)
        profile = replace(profile, concurrency=concurrency)
        cached.parent.mkdir(parents=True, exist_ok=True)
        save(profile, cached)
    encoded = peers.share("profile", msgspec.json.encode(profile))
    return msgspec.json.decode(encoded, type=ModelProfile)


def _compute_apart(devices: Sequence[jax.Device], peers: Peers) -> bool:
    """Whether no two processes compute with the same cores: accelerators, hosts of their own or
    pinned processes."""
    if not devices or devices[0].platform != "cpu":
        own: list[str] = []
    elif hasattr(os, "sched_getaffinity"):
        own = [f"{socket.gethostname()}/{core}" for core in os.sched_getaffinity(0)]
    else:
        own = [socket.gethostname()]
    every = [
        msgspec.json.decode(v) for v in peers.gather("profile/cores", msgspec.json.encode(own))
    ]
    cores = [core for cores in every for core in cores]
    return peers.share("profile/apart", b"1" * (len(cores) == len(set(cores)))) == b"1"


def _concurrency(
    model: MultimodalModel,
    shape: ModuleShape,
    every: Sequence[jax.Device],
    local: Sequence[jax.Device],
    peers: Peers,
) -> float:
    """Devices that really compute at once: the rate of all against that of one alone."""
    if len(every) == 1 or every[0].platform != "cpu":
        return float(len(every))
    alone = together(model, shape, local[:1]) if peers.is_hub else 0.0
    peers.barrier("profile/together")
    mine = together(model, shape, local) if local else 0.0
    alone, rate = peers.sums("profile/rates", [alone, mine])
    return min(float(len(every)), max(1.0, rate / alone))


def make_profile(setup: Setup, source: Source, on_progress: OnProgress | None = None) -> Profile:
    """Data profile of a source and model profile on the devices at hand."""
    data = profile_data(setup.config.plan, source)
    return Profile(profile_model(setup, data, on_progress), data)
