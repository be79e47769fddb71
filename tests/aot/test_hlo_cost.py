"""FLOPs, collectives and kernels of programs, by hand: on texts, and on compiled programs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.aot.hlo_cost import ProgramCost, program_cost
from dflop_jax.aot.hlo_text import ArrayType, pair_arrays, parse_hlo
from dflop_jax.profile.kernels import Kernel, Kind

F32 = jnp.float32


def compiled(function, *structs) -> str:
    return jax.jit(function).lower(*structs).compile().as_text()


def cost_of(text: str, visible_pairs: float = 1.0, **options) -> ProgramCost:
    return program_cost(parse_hlo(text), visible_pairs, **options)


def array(*shape, dtype=F32, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


# ---- programs compiled here ----


def loss(w, x):
    return jnp.sum((jnp.tanh(x @ w[0]) @ w[1]) ** 2)


# Of a gradient: two forward; of the first layer one for its weights, of the second one for what
# enters, too.
FIRST, SECOND = 2 * 96 * 128 * 256, 2 * 96 * 256 * 64
WEIGHTS = array(128, 256), array(256, 64)
HEADS = array(3, 64, 4, 32), array(3, 80, 4, 32)


@pytest.mark.parametrize(
    "function, structs, flops",
    [
        (jnp.matmul, (array(64, 128), array(128, 256)), 2 * 64 * 128 * 256),
        (lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k), HEADS, 2 * 3 * 4 * 64 * 80 * 32),
        (jax.grad(loss), (WEIGHTS, array(96, 128)), 2 * FIRST + 3 * SECOND),
    ],
)
def test_a_product_counts_two_flops_a_multiply_add(function, structs, flops):
    cost = cost_of(compiled(function, *structs))
    assert cost.flops == cost.float32_flops == flops
    assert not cost.unknown_loops
    assert not cost.unknown_kernels


def test_cost_is_of_one_device():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    x = array(64, 128, sharding=NamedSharding(mesh, P()))
    up = array(128, 256, sharding=NamedSharding(mesh, P(None, "model")))
    down = array(256, 128, sharding=NamedSharding(mesh, P("model", None)))
    program = jax.jit(lambda x, u, d: (x @ u) @ d, out_shardings=NamedSharding(mesh, P()))
    cost = cost_of(program.lower(x, up, down).compile().as_text())
    assert cost.flops == 2 * 2 * 64 * 128 * 256 / 4
    assert cost.collectives == {"all-reduce": 64 * 128 * 4}


# ---- texts ----

LOOPS = """
HloModule loops, is_scheduled=true

%inner_body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=1
  %w = bf16[16,16]{1,0} constant({...})
  ROOT %y = (bf16[8,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", metadata={op_name="a(b)"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
}

%condition (p.1: (s32[], bf16[8,16])) -> pred[] {
  %p.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%fused (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer_body (p.2: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p.2 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %wide = f32[8,16]{1,0} constant({...})
  %right = f32[16,4]{1,0} constant({...})
  %product = f32[8,4]{1,0} fusion(%wide, %right), kind=kCustom, calls=%fused, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  ROOT %w.1 = (s32[], bf16[8,16]{1,0}) while(%p.2), condition=%condition, body=%inner_body, backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}
}

ENTRY %main (arg: bf16[8,16]) -> (s32[], bf16[8,16]) {
  %arg = bf16[8,16]{1,0} parameter(0)
  ROOT %loop = (s32[], /*index=1*/bf16[8,16]{1,0}) while(%arg), condition=%condition, body=%outer_body, backend_config={"known_trip_count": {"n": "5"}}
}
"""  # noqa: E501


def test_loops_branches_and_asynchronous_calls_count_their_runs():
    fused, product = cost_of(LOOPS).kernels
    assert product == Kernel(
        Kind.MATMUL, 2.0 * 8 * 16 * 16, 2 * (3 * 128 + 128), 8, 16, 16, "bfloat16", repeats=35
    )
    assert fused == Kernel(
        Kind.MATMUL, 2.0 * 8 * 4 * 16, 4 * (128 + 64 + 32), 8, 4, 16, "float32", repeats=5
    )
    text = LOOPS.replace('"known_trip_count":{"n":"7"},', "")  # counts once and is named
    assert cost_of(text).flops == 5 * (2 * 8 * 16 * 16 + 2 * 8 * 16 * 4)
    assert (cost_of(text).unknown_loops, cost_of(LOOPS).unknown_loops) == (1, 0)
    flops, called = cost_of(LOOPS).flops, LOOPS.replace("ENTRY %main", "%main")
    ends = """
ENTRY %all (start: bf16[8,16]) -> (s32[]) {
  %s = ((bf16[8,16]{1,0}), (s32[]), u32[]) async-start(%start), calls=%main
  ROOT %d = (s32[]) async-done(%s), calls=%main
}
"""
    assert cost_of(called + ends).flops == flops
    ends = """
%cheap (c: bf16[8,16]) -> (s32[], bf16[8,16]) {
  ROOT %c = bf16[8,16]{1,0} parameter(0)
}

ENTRY %all (x.1: bf16[8,16]) -> bf16[8,16] {
  %x.1 = bf16[8,16]{1,0} parameter(0)
  ROOT %r = (s32[], bf16[8,16]{1,0}) conditional(%x.1), branch_computations={%cheap, %main}
}
"""
    assert cost_of(called + ends).flops == flops  # of the longest branch
    with pytest.raises(ValueError, match="ENTRY"):
        cost_of("nothing")


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


CUDNN = (
    '%y = (bf16[2,8,128,32]{{3,1,2,0}}, f32[2,8,128]{{2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, '
    '%k), custom_call_target="__cudnn$fmhaSoftmax{back}", backend_config={{'
    '"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"element_type": "BF16", '
    '"dimensions": ["2", "8", "128", "128"]}}, "mask_type": "{mask}"}}}}'
)  # fmt: skip
QK = ("%q = bf16[2,128,8,32]{3,2,1,0} parameter(0)", "%k = bf16[2,128,2,32]{3,2,1,0} parameter(1)")
PAIRS = 2 * 2 * 8 * 128 * 128 * 32  # FLOPs of one product over all pairs


@pytest.mark.parametrize(
    "back, mask, products",
    [("", "NO_MASK", 2), ("", "CAUSAL", 1), ("", "PADDING_CAUSAL", 1), ("Backward", "CAUSAL", 2.5)],
)
def test_cudnn_attention_counts_its_products(back, mask, products):
    cost = cost_of(entry(*QK, CUDNN.format(back=back, mask=mask)))
    assert cost.flops == products * PAIRS
    assert cost.float32_flops == 0
    assert not cost.unknown_kernels


KERNEL = ('%y = {} custom-call({}), custom_call_target="__gpu$xla.gpu.triton", '
          'backend_config={{name = "{}", ir = "(("}}')  # fmt: skip


def test_our_kernels_count_their_products():
    """Those of attention visible pairs, those of a delta net two products a chunk."""
    for name, products in (("forward", 2), ("kv_gradient", 4), ("q_gradient", 3)):
        name = f"packed_attention_{name}"
        call = KERNEL.format("bf16[2,128,8,32]{3,2,1,0}", "%q, %k, %k", name)
        assert cost_of(entry(*QK, call)).flops == products * PAIRS
        assert cost_of(entry(*QK, call), 0.5).flops == products * PAIRS / 2
    arrays = "%w = f32[5,8,64,32] parameter(0)", "%r = f32[5,8,64,16] parameter(1)"
    for name in ("delta_states", "delta_states_gradient"):
        call = KERNEL.format("(f32[5,8,16,32]{3,2,1,0}, f32[5,8,64,32]{3,2,1,0})", "%w, %r", name)
        cost = cost_of(entry(*arrays, call))
        assert cost.flops == cost.float32_flops == 5 * 8 * 2 * (2 * 64 * 16 * 32)


def test_kernels_of_libraries_are_marked():
    call = KERNEL.format("bf16[2,128,8,32]{3,2,1,0}", "%q, %k, %k", "packed_attention_forward")
    (ours,) = cost_of(entry(*QK, call)).kernels
    (theirs,) = cost_of(entry(*QK, call.replace("__gpu$xla.gpu.triton", "mosaic_gpu_v2"))).kernels
    assert theirs == replace(ours, library=True)
    (cudnn,) = cost_of(entry(*QK, CUDNN.format(back="", mask="NO_MASK"))).kernels
    assert cudnn.library


def test_attention_kernels_compute_whole_blocks():
    """Of 128 tokens and, in ours, of 16 elements of a head."""
    q = "%q = bf16[2,729,8,72]{3,2,1,0} parameter(0)"
    call = KERNEL.format("bf16[2,729,8,72]{3,2,1,0}", "%q, %q, %q", "packed_attention_forward")
    (kernel,) = cost_of(entry(q, call)).kernels
    assert kernel.pair_flops == 2 * 2 * (2 * 768 * 8 * 80)
    assert kernel.flops == kernel.pair_flops * 768
    call = CUDNN.format(back="", mask="PADDING").replace("128", "729")
    (kernel,) = cost_of(entry(q, call.replace("%k", "%q"))).kernels
    assert kernel.pair_flops == 2 * 2 * (2 * 768 * 8 * 72)
    assert kernel.flops == kernel.pair_flops * 768


def test_unknown_kernels_are_named():
    call = '%y = f32[4]{0} custom-call(%q), custom_call_target="mystery"'
    assert cost_of(entry(*QK, call)).unknown_kernels == {"mystery"}
    call = '%y = f32[4]{0} custom-call(%q), custom_call_target="__cub$DeviceRadixSort"'
    assert cost_of(entry(*QK, call)).unknown_kernels == set()


def test_collectives_count_the_larger_side():
    cost = cost_of(
        entry(
            "%x = bf16[4,8]{1,0} parameter(0)",
            "%g = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), dimensions={0}",
            "%d = bf16[16,8]{1,0} all-gather-done(%g)",
            "%s = bf16[1,8]{1,0} reduce-scatter(%x), dimensions={0}",
            "%b = ((bf16[4,8]{1,0}), bf16[1,8]{1,0}) reduce-scatter-start(%x), dimensions={0}",
            "%p = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) collective-permute-start(%x)",
            "%a = (bf16[4,8]{1,0}, f32[2]{0}) all-reduce(%x, %f), to_apply=%add",
            "%f = f32[2]{0} parameter(1)",
        )
    )
    assert cost.collectives == {
        "all-gather": 16 * 8 * 2,
        "reduce-scatter": 2 * 4 * 8 * 2,
        "collective-permute": 4 * 8 * 2,
        "all-reduce": 4 * 8 * 2 + 2 * 4,
    }


def test_types_are_read():
    module = parse_hlo(
        entry(
            "%t = (pred[3]{0}, /*index=1*/f8e4m3fn[2,2]{1,0:T(8,128)(4,1)}, s4[6]{0}) parameter(0)",
            'ROOT %c = f32[<=5,2]{1,0:S(5)} custom-call(%t), custom_call_target="a(b"',
        )
    )
    t, c = module.computations[module.entry].values()
    assert [(a.dtype, a.shape, a.n_bytes) for a in t.arrays] == [
        ("pred", (3,), 3), ("f8e4m3fn", (2, 2), 4), ("s4", (6,), 3)
    ]  # fmt: skip
    assert c.arrays == (ArrayType("f32", (5, 2)),)
    assert c.operands == [t]


# ---- kernels ----

TEXT = """
HloModule text, is_scheduled=true

%fused_slice (p0: bf16[24,8,16], p1: s32[], p2: bf16[8,16]) -> bf16[8,16] {
  %p0 = bf16[24,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %cut = bf16[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,8,16}
  %flat = bf16[8,16]{1,0} bitcast(%cut)
  %p2 = bf16[8,16]{1,0} parameter(2)
  ROOT %sum = bf16[8,16]{1,0} add(%flat, %p2)
}

%fused_update (q0: f32[24,8,16], q1: s32[], q2: f32[8,16]) -> f32[24,8,16] {
  %q0 = f32[24,8,16]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %old = f32[1,8,16]{2,1,0} dynamic-slice(%q0, %q1, %q1, %q1), dynamic_slice_sizes={1,8,16}
  %q2 = f32[8,16]{1,0} parameter(2)
  %more = f32[1,8,16]{2,1,0} bitcast(%q2)
  %new = f32[1,8,16]{2,1,0} add(%old, %more)
  ROOT %put = f32[24,8,16]{2,1,0} dynamic-update-slice(%q0, %new, %q1, %q1, %q1)
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
  %q = bf16[2,128,4,16]{3,2,1,0} constant({...})
  %ahead = (bf16[2,128,4,16]{3,2,1,0}, u8[999]{0}) custom-call(%q, %q), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="packed_attention_forward"}
  %back = bf16[2,128,4,16]{3,2,1,0} custom-call(%q, %q), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="packed_attention_q_gradient"}
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
    queries = 2 * 128 * 4 * 16 * 2
    product = 2.0 * 2 * 128 * 4 * 16  # of one pair of each token
    attention = 0.5 * 128 * product
    kernel = Kernel(Kind.ATTENTION, 0.0, 2 * queries, dtype="bfloat16")
    want = [
        Kernel(Kind.ELEMENTWISE, 0.0, 4 + 3 * small),
        Kernel(Kind.ELEMENTWISE, 0.0, 4 + 3 * wide),
        Kernel(Kind.LOOKUP, 0.0, 32 + 2 * wide),
        Kernel(Kind.COPY, 0.0, 2 * small),
        replace(kernel, kind=Kind.ATTENTION, flops=2 * attention, pair_flops=2 * product),
        replace(kernel, kind=Kind.ATTENTION_BACKWARD, flops=3 * attention, pair_flops=3 * product),
        Kernel(Kind.REDUCE, 0.0, 400.0, group=4, stride=2),
        Kernel(Kind.GATHER, 0.0, 1600.0, group=4, stride=2),
        Kernel(Kind.GATHER, 0.0, 1600.0, group=4, stride=1),
        Kernel(Kind.SEND, 0.0, 400.0, group=2),
    ]
    assert list(cost_of(TEXT, 0.5).kernels) == want
    begun = TEXT.replace(
        "%two = f32[24,8,16]{2,1,0} fusion(", "%two = (f32[], u32[]) fusion-start("
    )
    assert list(cost_of(begun, 0.5).kernels) == want
    bare = cost_of(TEXT, 0.5, content=False).kernels
    assert [k for k in bare if k.kind in (Kind.ATTENTION, Kind.ATTENTION_BACKWARD)] == [
        replace(k, flops=0.0) for k in want[4:6]
    ]


def test_attention_scores_are_found_if_stored():
    """Not where only those of a block of queries are kept at a time."""

    def attend(queries, x):
        return jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", queries, x), axis=-1) @ x

    def by_block(x):
        blocks = x.reshape(2, -1, 32, 4).swapaxes(0, 1)
        return jax.lax.map(lambda block: attend(block, x), blocks).swapaxes(0, 1).reshape(x.shape)

    x = array(2, 96, 4)
    whole, blocks = (
        pair_arrays(parse_hlo(compiled(f, x)), 96) for f in (lambda x: attend(x, x), by_block)
    )
    assert "f32[2,96,96]" in whole
    assert not blocks


FUSED_CUBLAS = """
HloModule text, is_scheduled=true

%fused (p0: bf16[24,8,16], p1: bf16[32,8], p2: f32[32,16]) -> (f32[32,16], s8[4194304]) {
  %p0 = bf16[24,8,16]{2,1,0} parameter(0)
  %p1 = bf16[32,8]{1,0} parameter(1)
  %p2 = f32[32,16]{1,0} parameter(2)
  %cut = bf16[1,8,16]{2,1,0} slice(%p0), slice={[3:4], [0:8], [0:16]}
  %flat = bf16[8,16]{1,0} bitcast(%cut)
  ROOT %y = (f32[32,16]{1,0}, s8[4194304]{0}) custom-call(%p1, %flat, %p2), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"beta":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
}

ENTRY %main (a: bf16[24,8,16], b: bf16[32,8], c: f32[32,16]) -> (f32[32,16], s8[4194304]) {
  %a = bf16[24,8,16]{2,1,0} parameter(0)
  %b = bf16[32,8]{1,0} parameter(1)
  %c = f32[32,16]{1,0} parameter(2)
  ROOT %y.1 = (f32[32,16]{1,0}, s8[4194304]{0}) fusion(%a, %b, %c), kind=kCustom, calls=%fused
}
"""  # noqa: E501


def test_product_of_a_stacks_row_that_adds_to_an_array():
    """It reads one row of the stack and the array; its workspace does not count."""
    n_bytes = 2 * (32 * 8 + 8 * 16) + 4 * 2 * 32 * 16
    want = Kernel(Kind.MATMUL, 2.0 * 32 * 8 * 16, n_bytes, 32, 16, 8, "bfloat16")
    assert cost_of(FUSED_CUBLAS).kernels == (want,)
