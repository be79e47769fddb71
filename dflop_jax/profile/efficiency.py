"""Seconds of kernels on a device: the roofline, and what is reached of it, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.profile.collectives import LINK_REACH, all_reduce_s
from dflop_jax.profile.kernels import ATTENTION, LOOKUP, REDUCE, Kernel


@dataclass(frozen=True)
class Efficiency:
    """What kernels reach of the hardware.

    The defaults are assumptions for GPUs: with them a bfloat16 product of n x n x n reaches 48%,
    70% and 76% of an A100's peak at n = 1024, 2048 and 4096, about what cuBLAS does. `LINK_REACH`
    is NCCL's own.
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
        kernels = [kernel for _, kernel in flat]
        return Table(
            n_rows=len(programs),
            row=np.array([i for i, _ in flat], int),
            kind=np.array([a.kind for a in kernels], int),
            flops=np.array([a.flops for a in kernels]),
            n_bytes=np.array([a.n_bytes for a in kernels]),
            dims=np.array([(a.rows, a.cols, a.depth) for a in kernels]).reshape(-1, 3),
            peak=np.array([hardware.peak_flops(a.dtype) for a in kernels]),
            repeats=np.array([a.repeats for a in kernels]),
            ways=np.array([ways[i] for i, _ in flat], int),
            hardware=hardware,
        )

    def seconds(self, e: Efficiency) -> np.ndarray:
        """Seconds of each program, [n_rows]."""
        share = np.where(self.kind == ATTENTION, e.attention, e.matmul)
        reach = (self.dims / (self.dims + e.half_dim)).prod(axis=1)
        compute = self.flops / (self.peak * share * reach)
        band = np.where(self.kind == LOOKUP, e.lookup, e.bandwidth) * self.hardware.memory_bandwidth
        seconds = np.maximum(compute, self.n_bytes / band) + e.launch_s
        for i in np.flatnonzero(self.kind == REDUCE):
            n, group = float(self.n_bytes[i]), int(self.ways[i])
            seconds[i] = all_reduce_s(n, group, self.hardware, reach=e.link)
        return np.bincount(self.row, seconds * self.repeats, self.n_rows)
