"""Accelerators and the links between them: figures from data sheets.

FLOP/s are dense (without structured sparsity), bandwidths are of one direction and one device, and
a gigabyte is 10^9 bytes, as in the data sheets. The cost model (`dflop_jax.profile`) estimates the
share that programs reach. For another cluster use `dataclasses.replace(find_hardware(...))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dflop_jax.records import Hardware

GB, GIB = 1e9, 2**30  # bytes
# Estimated host seconds per task in a process's dispatching thread, until a plan's programs are
# timed: Python, arguments and transfers, without kernel launches. Measured: 0.9 to 1.1 ms for each
# task of a step on two processes (x86 at 2 to 3 GHz, jax 0.10).
TASK_HOST_S = 1e-3


# Seconds of one ring step in the cost model of NCCL (src/graph/tuning.cc, hwLat, Ring, LL128).
_NVLINK_S, _PCIE_S, _NETWORK_S = 1.9e-6, 2.5e-6, 4.0e-6
_A100_NODE = "8 per node, NVLink 3: 600 GB/s both ways; DGX A100 data sheet: 8 x 200 Gb/s HDR"
_H100_NODE = "8 per node, NVLink 4: 900 GB/s both ways; DGX data sheet: 8 x 400 Gb/s NDR"

_A100 = Hardware(
    name="a100-40",
    chip="sm_80",
    bfloat16_flops=312e12,
    float32_flops=312e12 / 2,  # TF32, as for all GPUs with NVLink here
    memory_bytes=40 * GB,
    memory_bandwidth=1555 * GB,
    devices_per_node=8,
    link_bandwidth=300 * GB,
    link_latency_s=_NVLINK_S,
    network_bandwidth=25 * GB,
    network_latency_s=_NETWORK_S,
    source=f"NVIDIA A100 Tensor Core GPU data sheet, SXM4 40 GB; {_A100_NODE}",
)
_H100 = replace(
    _A100,
    name="h100",
    chip="sm_90",
    bfloat16_flops=989.4e12,
    float32_flops=989.4e12 / 2,
    memory_bytes=80 * GB,
    memory_bandwidth=3350 * GB,
    link_bandwidth=450 * GB,
    network_bandwidth=50 * GB,
    source=f"NVIDIA H100 Tensor Core GPU data sheet, SXM5; {_H100_NODE}",
)
_TABLE = (
    _A100,
    replace(
        _A100,
        name="a100-80",
        memory_bytes=80 * GB,
        memory_bandwidth=2039 * GB,
        source=f"NVIDIA A100 80GB Tensor Core GPU data sheet, SXM4; {_A100_NODE}",
    ),
    _H100,
    replace(
        _H100,
        name="h200",
        memory_bytes=141 * GB,
        memory_bandwidth=4800 * GB,
        source=f"NVIDIA H200 Tensor Core GPU data sheet, SXM5; {_H100_NODE}",
    ),
    replace(
        _H100,
        name="b200",
        chip="sm_100",
        bfloat16_flops=2250e12,
        float32_flops=2250e12 / 2,
        memory_bytes=180 * GB,
        memory_bandwidth=8000 * GB,
        link_bandwidth=900 * GB,
        source="NVIDIA DGX B200 data sheet (1,440 GB and 64 TB/s over 8 GPUs, NVLink 5: 1.8 TB/s "
        "both ways, 8 x 400 Gb/s); half of its sparse peaks",
    ),
    replace(
        _A100,
        name="l40s",
        chip="sm_89",
        bfloat16_flops=362.05e12,
        float32_flops=183e12,
        memory_bytes=48 * GB,
        memory_bandwidth=864 * GB,
        link_bandwidth=32 * GB,
        link_latency_s=_PCIE_S,
        network_bandwidth=12.5 * GB,
        source="NVIDIA L40S data sheet: no NVLink, PCIe 4.0 x16: 64 GB/s both ways; the network is "
        "an assumption: 100 Gb/s per device",
    ),
    # A device is one core, like the emulated CPU devices of tests and demos.
    Hardware(
        name="cpu",
        chip="cpu",
        bfloat16_flops=96e9,
        float32_flops=96e9,
        memory_bytes=4 * GB,
        memory_bandwidth=12.8 * GB,
        devices_per_node=8,
        link_bandwidth=6.4 * GB,
        link_latency_s=20e-6,
        network_bandwidth=1.25 * GB,
        network_latency_s=50e-6,
        source="assumption: a core with AVX2 at 3 GHz (2 fused multiply-adds of 8 floats a cycle) "
        "and half a channel of DDR4-3200, bfloat16 computed in float32; 10 Gb/s between hosts",
    ),
)
HARDWARE: Mapping[str, Hardware] = {h.name: h for h in _TABLE}


# jax's `device_kind` -> the row of the table with the same FLOP/s.
_ROW_OF_CHIP: Mapping[str, str] = {
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
}


def chip_peak_flops(kind: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of a chip, by jax's `device_kind`, for matrix products of a dtype;
    None for a chip that is not in the table."""
    row = _ROW_OF_CHIP.get(kind)
    return HARDWARE[row].peak_flops(dtype) if row else None


def hardware_of_kind(kind: str) -> Hardware:
    """Return the table's row of a chip, by jax's `device_kind`; the "cpu" row for unknown chips."""
    return HARDWARE[_ROW_OF_CHIP.get(kind, "cpu")]


def find_hardware(name: str) -> Hardware:
    """Return the table's row `name` in any case; ValueError lists the known names."""
    hardware = HARDWARE.get(name.strip().lower())
    if hardware is None:
        raise ValueError(f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}")
    return hardware
