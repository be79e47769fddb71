"""The table states what data sheets say, and refuses what cannot be."""

import dataclasses

import pytest

from dflop_jax.hardware import HARDWARE, chip_peak_flops, find_hardware


def test_names_are_found_whatever_their_case_and_others_list_the_known():
    assert find_hardware(" H100 ") is HARDWARE["h100"]
    for wrong in ("v100", "", "a100"):
        with pytest.raises(ValueError, match=r"known: a100-40, a100-80, h100, h200, b200, l40s, "):
            find_hardware(wrong)


def test_peaks_by_dtype():
    h = find_hardware("h100")
    assert h.peak_flops("bfloat16") == h.peak_flops("float16") == 989.4e12
    assert h.peak_flops("float32") == 494.7e12
    with pytest.raises(ValueError, match="'int3'; known: bfloat16, float16, float32"):
        h.peak_flops("int3")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_figures_are_refused(value):
    with pytest.raises(ValueError, match="'h100': memory_bytes"):
        dataclasses.replace(find_hardware("h100"), memory_bytes=value)


@pytest.mark.parametrize(
    "kind, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 156e12),
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
