"""The table states what data sheets say, and refuses what cannot be."""

import pytest

from dflop_jax.hardware import chip_peak_flops


@pytest.mark.parametrize(
    "kind, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 156e12),
        ("NVIDIA H100 80GB HBM3", "float32", 494.7e12),
        ("NVIDIA L40S", "float32", 183e12),
        ("NVIDIA H200", "bfloat16", 989.4e12),
        # Slower ones of the same name, and parts of one, must be stated.
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("cpu", "float32", None),
        ("", "float32", None),
    ],
)
def test_peaks_of_chips_by_what_jax_calls_them(kind, dtype, peak):
    assert chip_peak_flops(kind, dtype) == peak
