"""Seconds of kernels on a device: the roofline, what is reached of it, and how to fit that.

Constants stand in one record, so that a profile measured on one machine calibrates what is
predicted for other shapes and models on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import least_squares

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import Hardware
from dflop_jax.profile.collectives import LINK_REACH, all_reduce_s
from dflop_jax.profile.kernels import ATTENTION, LOOKUP, REDUCE, Kernel
from dflop_jax.profile.parts import ENDS, part_kernels, part_param_bytes
from dflop_jax.records import BACKWARD, FORWARD, ModelProfile


@dataclass(frozen=True)
class Efficiency:
    """What kernels reach of the hardware.

    The defaults are assumptions for GPUs, to be replaced by `fit_efficiency` where there is a
    profile: with them a bfloat16 product of n x n x n reaches 48%, 70% and 76% of an A100's peak
    at n = 1024, 2048 and 4096, about what cuBLAS does. `LINK_REACH` is NCCL's own.
    """

    matmul: float = 0.8
    "share of the peak that a large matrix product reaches"
    attention: float = 0.6
    "the same for the products of attention, batched over heads"
    half_dim: float = 64.0
    "a product that has this many rows, columns or depth reaches half, for each of them"
    bandwidth: float = 0.75
    "share of the memory bandwidth, elementwise work and products alike"
    lookup: float = 0.3
    "the same for gathers and scatters by row"
    launch_s: float = 4e-6
    "seconds that a kernel takes beside its work: launch, first loads, last stores"
    link: float = LINK_REACH
    "share of the links' bandwidth that collectives reach"
    task_s: float = 20e-6
    "seconds of a program call beside its kernels"

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"efficiency {f.name}={value} must be above 0")


@dataclass(frozen=True)
class Table:
    """Kernels of several programs as arrays; `row` says which program each belongs to."""

    n_rows: int
    row: np.ndarray
    kind: np.ndarray
    flops: np.ndarray
    n_bytes: np.ndarray
    dims: np.ndarray  # [kernels, 3]: rows, columns and depth of products
    peak: np.ndarray
    repeats: np.ndarray
    ways: np.ndarray
    hardware: Hardware

    @staticmethod
    def of(programs: Sequence[Iterable[Kernel]], ways: Sequence[int], hardware: Hardware) -> Table:
        """Programs (the kernels of each) and the devices in the tensor-parallel group of each."""
        flat = [(i, kernel) for i, program in enumerate(programs) for kernel in program]
        each = [kernel for _, kernel in flat]
        return Table(
            n_rows=len(programs),
            row=np.array([i for i, _ in flat], int),
            kind=np.array([a.kind for a in each], int),
            flops=np.array([a.flops for a in each]),
            n_bytes=np.array([a.n_bytes for a in each]),
            dims=np.array([(a.rows, a.cols, a.depth) for a in each]).reshape(-1, 3),
            peak=np.array([hardware.peak_flops(a.dtype) for a in each]),
            repeats=np.array([a.repeats for a in each]),
            ways=np.array([ways[i] for i, _ in flat], int),
            hardware=hardware,
        )

    def seconds(self, e: Efficiency) -> np.ndarray:
        """Of each program, [n_rows]."""
        share = np.where(self.kind == ATTENTION, e.attention, e.matmul)
        reach = (self.dims / (self.dims + e.half_dim)).prod(axis=1)
        compute = self.flops / (self.peak * share * reach)
        band = np.where(self.kind == LOOKUP, e.lookup, e.bandwidth) * self.hardware.memory_bandwidth
        each = np.maximum(compute, self.n_bytes / band) + e.launch_s
        for i in np.flatnonzero(self.kind == REDUCE):
            n, group = float(self.n_bytes[i]), int(self.ways[i])
            each[i] = all_reduce_s(n, group, self.hardware, reach=e.link)
        return np.bincount(self.row, each * self.repeats, self.n_rows)


_QUANTITIES = (
    ("layer_forward_s", FORWARD, ("layers",)),
    ("layer_backward_s", BACKWARD, ("layers",)),
    ("ends_forward_s", FORWARD, ENDS),
    ("ends_backward_s", BACKWARD, ENDS),
)


def _measured(
    profile: ModelProfile, model: MultimodalModel
) -> Iterator[tuple[float, list[Kernel], int]]:
    """(seconds, kernels, tensor-parallel degree) of every quantity timed.

    Left out are those of devices that shared cores, and the ends of small programs where noise
    made them nothing.
    """
    for t in profile.timings:
        if t.model > profile.concurrency or t.shape.items == 0:
            continue
        module = model.modules[t.module]
        for name, direction, parts in _QUANTITIES:
            seconds = getattr(t, name)
            if seconds > 0:
                found = [part_kernels(module, p, direction, t.shape, t.model) for p in parts]
                yield seconds, [kernel for each in found for kernel in each], t.model


def fit_efficiency(
    profile: ModelProfile,
    model: MultimodalModel,
    hardware: Hardware,
    *,
    start: Efficiency | None = None,
) -> Efficiency:
    """The constants under which the roofline comes closest to a measured profile.

    Relative errors count, and single ones that are far off count less. What the profile does not
    tell (links where one device was timed, a bound that nothing reaches) stays as in `start`.

    Args:
      profile: measured on `hardware`, without remat of layers.
      start: the constants to begin with; None: the defaults.

    Raises:
      ValueError: the profile is of another model, or holds no time.
    """
    _check_same(profile, model)
    start = start or Efficiency()
    rows = list(_measured(profile, model))
    if not rows:
        raise ValueError("the profile holds no time above 0; profile again")
    table = Table.of([r[1] for r in rows], [r[2] for r in rows], hardware)
    wanted = np.log([r[0] for r in rows])
    names = [f.name for f in fields(Efficiency) if f.name != "task_s"]
    first = np.log([getattr(start, n) for n in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        e = replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))
        missed = np.log(np.maximum(table.seconds(e), 1e-12)) - wanted
        return np.concatenate([missed, _HOLD * (x - first)])

    found = least_squares(residuals, first, loss="soft_l1", f_scale=0.3)
    constants = dict(zip(names, np.exp(found.x).tolist(), strict=True))
    return replace(start, **constants, task_s=max(profile.task_overhead_s, 1e-9))


_HOLD = 1e-3  # pull towards the start, for what the profile does not tell


def _check_same(profile: ModelProfile, model: MultimodalModel) -> None:
    have = {n: m.n_layers for n, m in model.modules.items()}
    sizes = {n: part_param_bytes(m, "layers", 1) for n, m in model.modules.items()}
    if profile.n_layers != have or profile.layer_param_bytes != sizes:
        raise ValueError(
            f"the profile is of another model: it has layers {profile.n_layers} of "
            f"{profile.layer_param_bytes} bytes, this model {have} of {sizes}"
        )
