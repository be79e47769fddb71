"""Seconds of kernels on a device: the roofline, and what is reached of it, in one record.

Kernels come from programs that were compiled for the chip, or else from traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dflop_jax.profile.collectives import LINK_REACH, all_gather_s, all_reduce_s, send_s
from dflop_jax.profile.kernels import (
    ATTENTION,
    ATTENTION_BACK,
    GATHER,
    LOOKUP,
    REDUCE,
    SEND,
    Kernel,
)
from dflop_jax.records import Hardware

_COLLECTIVES = (REDUCE, GATHER, SEND)


@dataclass(frozen=True)
class Efficiency:
    """What kernels reach of the hardware.

    The defaults are assumptions for GPUs: with them a bfloat16 product of n x n x n reaches 48%,
    63% and 68% of an A100's peak at n = 1024, 2048 and 4096. Attention is that of `models`' kernels
    as five rows of docs/gpus.md were timed on an H100, met to 27%. `LINK_REACH` is NCCL's own.
    """

    matmul: float = 0.72
    "share of the peak that a large matrix product reaches"
    attention: float = 0.26
    "the same for the products of attention, batched over heads"
    attention_back: float = 0.42
    "the same for those of its gradient, as many as its kernels compute"
    attention_pairs: float = 700.0
    "an attention kernel takes so many pairs' time more for each token"
    half_dim: float = 64.0
    "a product that has this many rows, columns or depth reaches half, for each of them"
    bandwidth: float = 0.85
    "share of the memory bandwidth, elementwise work and products alike"
    lookup: float = 0.3
    "the same for gathers and scatters by row"
    launch_s: float = 3e-6
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
    pair_flops: np.ndarray
    n_bytes: np.ndarray
    dims: np.ndarray  # [kernels, 3]: rows, columns and depth of products, else 0
    peak: np.ndarray
    repeats: np.ndarray
    group: np.ndarray  # [kernels, 2]: devices that a collective joins, and their distance
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
            pair_flops=np.array([a.pair_flops for a in kernels]),
            n_bytes=np.array([a.n_bytes for a in kernels]),
            dims=np.array([(a.rows, a.cols, a.depth) for a in kernels]).reshape(-1, 3),
            peak=np.array([hardware.peak_flops(a.dtype) for a in kernels]),
            repeats=np.array([a.repeats for a in kernels]),
            group=np.array([(a.group or ways[i], a.stride) for i, a in flat], int).reshape(-1, 2),
            hardware=hardware,
        )

    def seconds(self, e: Efficiency) -> np.ndarray:
        """Seconds of each program, [n_rows]."""
        each = (self._work_s(e) + self._launch_s(e)) * self.repeats
        return np.bincount(self.row, each, self.n_rows)

    def _launch_s(self, e: Efficiency) -> np.ndarray:
        return np.where(np.isin(self.kind, _COLLECTIVES), 0.0, e.launch_s)

    def _work_s(self, e: Efficiency) -> np.ndarray:
        """Seconds of one run of each kernel beside its launch."""
        share = np.select(
            [self.kind == ATTENTION, self.kind == ATTENTION_BACK],
            [e.attention, e.attention_back],
            e.matmul,
        )
        reached = self.dims / (self.dims + e.half_dim)
        reach = np.where(self.dims > 0, reached, 1.0).prod(axis=1)
        flops = self.flops + e.attention_pairs * self.pair_flops
        compute = flops / (self.peak * share * reach)
        band = np.where(self.kind == LOOKUP, e.lookup, e.bandwidth) * self.hardware.memory_bandwidth
        seconds = np.maximum(compute, self.n_bytes / band)
        for i in np.flatnonzero(np.isin(self.kind, _COLLECTIVES)):
            seconds[i] = self._collective_s(int(i), e.link)
        return seconds

    def _collective_s(self, i: int, reach: float) -> float:
        n_bytes, (group, stride) = float(self.n_bytes[i]), self.group[i].tolist()
        if self.kind[i] == SEND:
            return send_s(n_bytes, self.hardware, reach=reach)
        collective = all_reduce_s if self.kind[i] == REDUCE else all_gather_s
        return float(collective(n_bytes, group, self.hardware, stride=stride, reach=reach))
