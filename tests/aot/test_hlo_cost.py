"""The counter of FLOPs and collectives, by hand: on texts, and on compiled programs; and arrays of
pairs of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.aot.hlo_cost import ProgramCost, program_cost
from dflop_jax.aot.hlo_text import ArrayType, pair_arrays, parse_hlo

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
        (jnp.matmul, (array(100, 300), array(300, 70)), 2 * 100 * 300 * 70),
        (lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k), HEADS, 2 * 3 * 4 * 64 * 80 * 32),
        (jax.grad(loss), (WEIGHTS, array(96, 128)), 2 * FIRST + 3 * SECOND),
    ],
    ids=["matrix", "odd sizes", "batch", "gradient"],
)
def test_a_product_counts_two_flops_a_multiply_add(function, structs, flops):
    cost = cost_of(compiled(function, *structs))
    assert cost.flops == cost.float32_flops == flops
    assert not cost.unknown_loops
    assert not cost.unknown_kernels


def test_loops_count_as_often_as_they_run():
    def inner(x, w):
        return jnp.tanh(x @ w), None

    def outer(x, ws):
        y, _ = jax.lax.scan(inner, x, ws)
        return y @ ws[0], None

    def program(x, ws):
        return jax.lax.scan(outer, x, ws)[0]

    cost = cost_of(compiled(program, array(32, 128), array(5, 3, 128, 128)))
    assert cost.flops == 5 * (3 + 1) * 2 * 32 * 128 * 128
    assert not cost.unknown_loops


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
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=1
  %w = bf16[16,16]{1,0} constant({...})
  %y = (bf16[8,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", metadata={op_name="a(b)"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
  %z = bf16[8,16]{1,0} get-tuple-element(%y), index=0
  ROOT %t = (s32[], bf16[8,16]{1,0}) tuple(%i, %z)
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
  %zero = s32[] constant(0)
  %start = (s32[], bf16[8,16]{1,0}) tuple(%zero, %arg)
  ROOT %loop = (s32[], /*index=1*/bf16[8,16]{1,0}) while(%start), condition=%condition, body=%outer_body, backend_config={"known_trip_count": {"n": "5"}}
}
"""  # noqa: E501


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    text = LOOPS.replace('"known_trip_count":{"n":"7"},', "")
    cost = cost_of(text)
    assert cost.flops == 5 * (2 * 8 * 16 * 16 + 2 * 8 * 16 * 4)
    assert cost.unknown_loops == 1


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


CUDNN = (
    '%y = (bf16[2,8,64,32]{{3,1,2,0}}, f32[2,8,64]{{2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), '
    'custom_call_target="__cudnn$fmhaSoftmax{back}", backend_config={{"cudnn_fmha_backend_config": '
    '{{"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": ["2", "8", "64", "64"]'
    '}}, "mask_type": "{mask}"}}}}'
)  # fmt: skip
QK = ("%q = bf16[2,64,8,32]{3,2,1,0} parameter(0)", "%k = bf16[2,64,2,32]{3,2,1,0} parameter(1)")
PAIRS = 2 * 2 * 8 * 64 * 64 * 32  # FLOPs of one product over all pairs


@pytest.mark.parametrize(
    "back, mask, products",
    [("", "NO_MASK", 2), ("", "CAUSAL", 1), ("", "PADDING_CAUSAL", 1), ("Backward", "CAUSAL", 2.5)],
)
def test_cudnn_attention_counts_its_products(back, mask, products):
    cost = cost_of(entry(*QK, CUDNN.format(back=back, mask=mask)))
    assert cost.flops == products * PAIRS
    assert cost.float32_flops == 0
    assert not cost.unknown_kernels


ATTENTION_KERNELS = {
    "packed_attention_forward": 2,
    "packed_attention_kv_gradient": 4,
    "packed_attention_q_gradient": 3,
}


@pytest.mark.parametrize("name, products", ATTENTION_KERNELS.items())
def test_our_attention_kernels_count_visible_pairs(name, products):
    call = (
        "%y = bf16[2,64,8,32]{3,2,1,0} custom-call(%q, %k, %k), custom_call_target="
        f'"__gpu$xla.gpu.triton", backend_config={{name = "{name}", ir = "(("}}'
    )
    assert cost_of(entry(*QK, call)).flops == products * PAIRS
    assert cost_of(entry(*QK, call), 0.5).flops == products * PAIRS / 2


@pytest.mark.parametrize("name", ["delta_states", "delta_states_gradient"])
def test_delta_state_kernels_count_two_products_a_chunk(name):
    call = (
        "%y = (f32[5,8,16,32]{3,2,1,0}, f32[5,8,64,32]{3,2,1,0}) custom-call(%w, %r), "
        f'custom_call_target="__gpu$xla.gpu.triton", backend_config={{name = "{name}", ir = "(("}}'
    )
    arrays = "%w = f32[5,8,64,32] parameter(0)", "%r = f32[5,8,64,16] parameter(1)"
    cost = cost_of(entry(*arrays, call))
    assert cost.flops == cost.float32_flops == 5 * 8 * 2 * (2 * 64 * 16 * 32)


def test_unknown_kernels_are_named():
    call = '%y = f32[4]{0} custom-call(%q), custom_call_target="mystery"'
    assert cost_of(entry(*QK, call)).unknown_kernels == {"mystery"}
    call = '%y = f32[4]{0} custom-call(%q), custom_call_target="__cub$DeviceRadixSort"'
    assert cost_of(entry(*QK, call)).unknown_kernels == set()


def test_an_asynchronous_call_counts_once():
    call = """  %s = ((bf16[8,16]{1,0}), (s32[]), u32[]) async-start(%start), calls=%main
  ROOT %d = (s32[]) async-done(%s), calls=%main
}
"""
    text = LOOPS.replace("ENTRY %main", "%main")
    text += f"\nENTRY %all (start: bf16[8,16]) -> (s32[]) {{\n{call}"
    assert cost_of(text).flops == cost_of(LOOPS).flops


def test_conditional_counts_its_longest_branch():
    text = (
        LOOPS.replace("ENTRY %main", "%main").replace("ROOT %loop", "%loop")
        + """
%cheap (c: bf16[8,16]) -> (s32[], bf16[8,16]) {
  ROOT %c = bf16[8,16]{1,0} parameter(0)
}

ENTRY %all (x.1: bf16[8,16]) -> bf16[8,16] {
  %x.1 = bf16[8,16]{1,0} parameter(0)
  %which = s32[] constant(1)
  ROOT %r = (s32[], bf16[8,16]{1,0}) conditional(%which, %x.1, %x.1), branch_computations={%cheap, %main}
}
"""  # noqa: E501
    )
    assert cost_of(text).flops == cost_of(LOOPS).flops


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
    computation = module.computations[module.entry]
    assert computation["t"].arrays == (
        ArrayType("pred", (3,)),
        ArrayType("f8e4m3fn", (2, 2)),
        ArrayType("s4", (6,)),
    )
    assert [a.n_bytes for a in computation["t"].arrays] == [3, 4, 3]
    assert computation["c"].arrays == (ArrayType("f32", (5, 2)),)
    assert computation["c"].operands == [computation["t"]]


# ---- arrays of pairs of tokens ----

N_HEADS, TOKENS, SIZE, BLOCK = 2, 96, 4, 32


def dense(x):
    """Attention of every token to all of its row."""
    return jax.nn.softmax(x @ x.swapaxes(1, 2), axis=-1) @ x


def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: dense(x), x)


def by_block(x):
    """Attention of every token, of whose scores only one block is kept at a time."""

    def block(queries):
        return jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", queries, x), axis=-1) @ x

    queries = x.reshape(N_HEADS, -1, BLOCK, SIZE).swapaxes(0, 1)
    return jax.lax.map(block, queries).swapaxes(0, 1).reshape(x.shape)


SCORES = f"f32[{N_HEADS},{TOKENS},{TOKENS}]"


@pytest.mark.parametrize(
    ("function", "found"),
    [(dense, SCORES), (in_a_loop, SCORES), (by_block, ""), (jnp.tanh, "")],
)
def test_attention_scores_are_found_if_stored(function, found):
    x = array(N_HEADS, TOKENS, SIZE)
    text = compiled(function, x)
    arrays = pair_arrays(parse_hlo(text), TOKENS)
    assert found in arrays if found else not arrays
