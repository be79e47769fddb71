"""What a program costs by its text, by hand."""

import dataclasses

import pytest

from dflop_jax.gpu_compile.hlo_kernels import hlo_kernels
from dflop_jax.gpu_compile.modelled import modelled_terms
from dflop_jax.hardware import find_hardware
from dflop_jax.profile.efficiency import Efficiency, Table


def test_terms_of_a_program():
    """A product, a copy, a fusion that reads one layer of a stack, and an update in place."""
    text = """
HloModule jit_f

fused (p0: bf16[4,128,128], p1: bf16[128,128]) -> bf16[128,128] {
  %p0 = bf16[4,128,128]{2,1,0} parameter(0)
  %p1 = bf16[128,128]{1,0} parameter(1)
  %one = bf16[1,128,128]{2,1,0} slice(%p0), slice={[1:2], [0:128], [0:128]}
  %flat = bf16[128,128]{1,0} bitcast(%one)
  ROOT %sum = bf16[128,128]{1,0} multiply(%flat, %p1)
}

update (p0: f32[4,128,128], p1: f32[1,128,128], p2: s32[]) -> f32[4,128,128] {
  %p0 = f32[4,128,128]{2,1,0} parameter(0)
  %p1 = f32[1,128,128]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[4,128,128]{2,1,0} dynamic-update-slice(%p0, %p1, %p2, %zero, %zero)
}

ENTRY main (a: bf16[4,128,128], b: bf16[128,128]) -> bf16[128,128] {
  %a = bf16[4,128,128]{2,1,0} parameter(0)
  %b = bf16[128,128]{1,0} parameter(1)
  %c = f32[4,128,128]{2,1,0} parameter(2)
  %d = f32[1,128,128]{2,1,0} parameter(3)
  %i = s32[] parameter(4)
  %read = bf16[128,128]{1,0} fusion(%a, %b), kind=kLoop, calls=fused
  %written = f32[4,128,128]{2,1,0} fusion(%c, %d, %i), kind=kLoop, calls=update
  %again = bf16[128,128]{1,0} copy(%read)
  ROOT %out = bf16[128,128] dot(%again, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    hardware = dataclasses.replace(find_hardware("h100"), memory_bandwidth=1e9)
    reach = Efficiency(matmul=0.7, half_dim=1e-9, bandwidth=1.0, launch_s=1e-3)
    terms = modelled_terms(text, 1.0, hardware, reach)
    page = 128 * 128
    read_s, copied_s = 3 * 2 * page / 1e9, (2 * 2 * page + 2 * 4 * page + 4) / 1e9
    want = {
        "products": 3 * 2 * page / 1e9,  # bound by its bytes
        "attention": 0.0,
        "elementwise": read_s,  # of the stack one layer
        "copies": copied_s,  # of the update its place and the part that changes
        "collectives": 0.0,
        "launches": 4e-3,
    }
    assert terms == pytest.approx(want)
    whole = Table.of([hlo_kernels(text)], [1], hardware).seconds(reach)
    assert sum(terms.values()) == pytest.approx(whole[0])
