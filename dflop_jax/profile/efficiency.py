"""Seconds of kernels on a device by the roofline, with the efficiencies in one record.

Kernels come from programs that were compiled for the chip, or from traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from dflop_jax.profile.collectives import LINK_EFFICIENCY, all_gather_s, all_reduce_s, send_s
from dflop_jax.profile.kernels import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GATHER,
    LOOKUP,
    REDUCE,
    SEND,
    Kernel,
)
from dflop_jax.records import Hardware


@dataclass(frozen=True)
class Efficiency:
    """What kernels reach of the hardware.

    The defaults are assumptions for GPUs: with them a bfloat16 product of n x n x n reaches 48%,
    63% and 68% of an A100's peak at n = 1024, 2048 and 4096. Attention is that of `models`' kernels
    as five rows of docs/gpus.md were timed on an H100, met to 27%. `LINK_EFFICIENCY` is NCCL's own.
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
    link: float = LINK_EFFICIENCY
    "share of the links' bandwidth that collectives reach"
    task_s: float = 20e-6
    "seconds of a program call beside its kernels"


def program_s(
    kernels: Iterable[Kernel], tp: int, hardware: Hardware, efficiency: Efficiency = Efficiency()
) -> float:
    """Seconds of a program's kernels, one after another, on one of the `tp` devices of a
    tensor-parallel group."""
    seconds = 0.0
    for kernel in kernels:
        seconds += kernel.repeats * _kernel_s(kernel, tp, hardware, efficiency)
    return seconds


def _kernel_s(kernel: Kernel, tp: int, hardware: Hardware, efficiency: Efficiency) -> float:
    """Seconds of one run of a kernel."""
    if kernel.kind == SEND:
        return float(send_s(kernel.n_bytes, hardware, efficiency=efficiency.link))
    if kernel.kind in (REDUCE, GATHER):
        collective = all_reduce_s if kernel.kind == REDUCE else all_gather_s
        group_size = kernel.group or tp
        return float(
            collective(
                kernel.n_bytes,
                group_size,
                hardware,
                stride=kernel.stride,
                efficiency=efficiency.link,
            )
        )
    peak_share = {
        ATTENTION: efficiency.attention,
        ATTENTION_BACKWARD: efficiency.attention_back,
    }.get(kernel.kind, efficiency.matmul)
    size_factor = prod(
        d / (d + efficiency.half_dim) for d in (kernel.rows, kernel.cols, kernel.depth) if d > 0
    )
    flops = kernel.flops + efficiency.attention_pairs * kernel.pair_flops
    compute_s = flops / (hardware.peak_flops(kernel.dtype) * peak_share * size_factor)
    bytes_per_s = (
        efficiency.lookup if kernel.kind == LOOKUP else efficiency.bandwidth
    ) * hardware.memory_bandwidth
    return max(compute_s, kernel.n_bytes / bytes_per_s) + efficiency.launch_s
