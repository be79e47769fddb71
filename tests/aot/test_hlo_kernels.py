"""Kernels read from optimized programs, by hand: what they compute, read and write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflop_jax.profile.kernels import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COPY,
    ELEMENTWISE,
    GATHER,
    LOOKUP,
    MATMUL,
    REDUCE,
    SEND,
    Kernel,
)

from .test_hlo_cost import LOOPS, cost_of

TEXT = """
HloModule text, is_scheduled=true

%fused_slice (p0: bf16[24,8,16], p1: s32[], p2: bf16[8,16]) -> bf16[8,16] {
  %p0 = bf16[24,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %z = s32[] constant(0)
  %cut = bf16[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %z, %z), dynamic_slice_sizes={1,8,16}
  %flat = bf16[8,16]{1,0} bitcast(%cut)
  %p2 = bf16[8,16]{1,0} parameter(2)
  ROOT %sum = bf16[8,16]{1,0} add(%flat, %p2)
}

%fused_update (q0: f32[24,8,16], q1: s32[], q2: f32[8,16]) -> f32[24,8,16] {
  %q0 = f32[24,8,16]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %zz = s32[] constant(0)
  %old = f32[1,8,16]{2,1,0} dynamic-slice(%q0, %q1, %zz, %zz), dynamic_slice_sizes={1,8,16}
  %q2 = f32[8,16]{1,0} parameter(2)
  %more = f32[1,8,16]{2,1,0} bitcast(%q2)
  %new = f32[1,8,16]{2,1,0} add(%old, %more)
  ROOT %put = f32[24,8,16]{2,1,0} dynamic-update-slice(%q0, %new, %q1, %zz, %zz)
}

%fused_lookup (r0: f32[1000,16], r1: s32[8]) -> f32[8,16] {
  %r0 = f32[1000,16]{1,0} parameter(0)
  %r1 = s32[8]{0} parameter(1)
  ROOT %rows = f32[8,16]{1,0} gather(%r0, %r1), offset_dims={1}, collapsed_slice_dims={0}
}

ENTRY %main (a: bf16[24,8,16], i: s32[], b: bf16[8,16], c: f32[24,8,16], d: f32[8,16]) -> f32[] {
  %a = bf16[24,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = bf16[8,16]{1,0} parameter(2)
  %c = f32[24,8,16]{2,1,0} parameter(3)
  %d = f32[8,16]{1,0} parameter(4)
  %one = bf16[8,16]{1,0} fusion(%a, %i, %b), kind=kLoop, calls=%fused_slice
  %two = f32[24,8,16]{2,1,0} fusion(%c, %i, %d), kind=kLoop, calls=%fused_update
  %table = f32[1000,16]{1,0} constant({...})
  %ids = s32[8]{0} constant({...})
  %three = f32[8,16]{1,0} fusion(%table, %ids), kind=kLoop, calls=%fused_lookup
  %copied = bf16[8,16]{1,0} copy(%one)
  %q = bf16[2,64,4,16]{3,2,1,0} constant({...})
  %ahead = (bf16[2,64,4,16]{3,2,1,0}, u8[999]{0}) custom-call(%q, %q), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="packed_attention_forward"}
  %back = bf16[2,64,4,16]{3,2,1,0} custom-call(%q, %q), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="packed_attention_q_gradient"}
  %r = f32[100]{0} constant({...})
  %s0 = f32[100]{0} all-reduce-start(%r), replica_groups=mesh['x'=2,'y'=4,'z'=2] {'y'}, to_apply=%add
  %s1 = f32[100]{0} all-reduce-done(%s0)
  %g = f32[400]{0} all-gather(%r), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %h = f32[100]{0} reduce-scatter(%g), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
  %p = f32[100]{0} collective-permute(%r), source_target_pairs={{0,1}}
  ROOT %end = f32[] all-reduce(%i), replica_groups={{0},{1}}, to_apply=%add
}
"""  # noqa: E501


def test_each_kernel_by_hand():
    """A slice of a stack is what is read of it, and an update in place what is written."""
    small, wide = 8 * 16 * 2, 8 * 16 * 4
    queries = 2 * 64 * 4 * 16 * 2
    product = 2.0 * 2 * 64 * 4 * 16  # of one pair of each token
    attention = 0.5 * 64 * product
    kernel = Kernel(ATTENTION, 0.0, 2 * queries, dtype="bfloat16")
    want = [
        Kernel(ELEMENTWISE, 0.0, 4 + 3 * small),
        Kernel(ELEMENTWISE, 0.0, 4 + 3 * wide),
        Kernel(LOOKUP, 0.0, 32 + 2 * wide),
        Kernel(COPY, 0.0, 2 * small),
        replace(kernel, kind=ATTENTION, flops=2 * attention, pair_flops=2 * product),
        replace(kernel, kind=ATTENTION_BACKWARD, flops=3 * attention, pair_flops=3 * product),
        Kernel(REDUCE, 0.0, 400.0, group=4, stride=2),
        Kernel(GATHER, 0.0, 1600.0, group=4, stride=2),
        Kernel(GATHER, 0.0, 1600.0, group=4, stride=1),
        Kernel(SEND, 0.0, 400.0, group=2),
    ]
    assert list(cost_of(TEXT, 0.5).kernels) == want
    bare = cost_of(TEXT, 0.5, content=False).kernels
    assert [k for k in bare if k.kind in (ATTENTION, ATTENTION_BACKWARD)] == [
        replace(k, flops=0.0) for k in want[4:6]
    ]


def test_kernels_in_loops_count_every_run():
    fused, product = cost_of(LOOPS).kernels
    assert product == Kernel(
        MATMUL, 2.0 * 8 * 16 * 16, 2 * (3 * 128 + 128), 8, 16, 16, "bfloat16", repeats=35
    )
    assert fused == Kernel(
        MATMUL, 2.0 * 8 * 4 * 16, 4 * (128 + 64 + 32), 8, 4, 16, "float32", repeats=5
    )


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        cost_of("nothing")
