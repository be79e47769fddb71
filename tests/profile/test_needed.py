"""Needed FLOPs of pieces and of segments' programs, against counts by hand."""

from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dflop_jax.profile.needed import needed_flops, segment_flops, visible_pair_share
from dflop_jax.records import BACKWARD, FORWARD, Edge, MeshShape, SegmentPlan, Shape
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.segment import EVALUATE, Segment
from models.decoder import DecoderModule
from models.llava import build as build_llava
from models.sizes import DecoderSize, VisionSize
from models.vit import VisionModule
from tests.graphs.made_up import GRAINS, VOCAB, WIDTH, MadeUp

ROWS = {"vision": 16, "llm": 96}  # tokens of a row: a tile's, and any


def decoder_products(s):
    """FLOPs for a token of a layer's matrices: query, key, value; out; MLP."""
    kv = s.n_kv_heads * s.head_dim
    return 2 * s.width * (s.width + 2 * kv), 2 * s.width**2, 2 * 3 * s.width * s.mlp


def causal(s, n):
    return sum(4 * s.n_heads * s.head_dim for i in range(n) for j in range(i + 1))


@pytest.mark.parametrize("n", [1, 40, 200])
@pytest.mark.parametrize(
    "frozen, tower, connector, llm",
    [
        # Products forward and backward: one forward, one for the gradient of each operand.
        ((), 3, 3, 3),
        (("vision",), 1, 3, 3),  # a norm before the connector's first matrix trains with it
        (("vision", "llm"), 1, 3, 2),
        (("vision", "connector"), 1, 1, 3),
        (("connector", "llm"), 3, 2, 2),
    ],
)
def test_a_llava_by_hand(frozen, tower, connector, llm, n):
    model = build_llava("nano")
    v, d = model.size.vision, model.size.decoder
    count = needed_flops(model, ROWS, frozen)

    patches = v.patches_per_tile
    layer = 2 * patches * (4 * v.width**2 + 2 * v.width * v.mlp)
    attention = 4 * patches**2 * v.width
    visual = v.tokens_per_tile
    mlp = connector * 2 * visual * d.width * (v.merge**2 * v.width + d.width)
    # Pixels need no gradient: the stem has one product less than what trains behind it.
    stem = min(tower, 2) * 2 * patches * 3 * v.patch_px**2 * v.width
    assert count["vision"](16) == stem + tower * v.n_layers * (layer + attention) + mlp

    products = llm * n * (d.n_layers * sum(decoder_products(d)) + 2 * d.width * d.vocab)
    pairs = 3 * d.n_layers * causal(d, n)  # two activations: both need a gradient, frozen or not
    assert count["llm"](n) == products + pairs


def test_adapters_by_hand():
    rank, n = 3, 50
    model = build_llava("nano").with_lora(rank, 6.0)
    d = model.size.decoder
    count = needed_flops(model, ROWS, ("vision", "connector", "llm"))["llm"]
    qkv, out, mlp = decoder_products(d)
    kv = d.n_kv_heads * d.head_dim
    b_of_qkv, a_of_qkv = 2 * rank * (d.width + 2 * kv), 2 * rank * 3 * d.width
    others = 2 * rank * (2 * d.width + 3 * (d.width + d.mlp))
    first = qkv + 2 * a_of_qkv + 3 * b_of_qkv  # embeddings are frozen: no gradient leaves it
    rest = 2 * qkv + 3 * a_of_qkv + 3 * b_of_qkv
    layers = first + (d.n_layers - 1) * rest + d.n_layers * (2 * (out + mlp) + 3 * others)
    head = 2 * 2 * d.width * d.vocab
    assert count(n) == n * (layers + head) + 3 * d.n_layers * causal(d, n)


def test_needed_flops_of_a_graph_without_attention_flops():
    model = MadeUp()
    rows = {"sights": 32, "smells": GRAINS, "words": 64, "echoes": 32}
    square = 2 * WIDTH**2
    count = needed_flops(model, rows)
    # Values need no gradient; two features of `sights` are merged into one, at its exit and tap.
    assert count["sights"](10) == 10 * (2 * 2 * 2 * WIDTH + 3 * 3 * square + 2 * 3 * square)
    assert count["smells"](GRAINS) == GRAINS * (2 * 2 * WIDTH + 3 * 2 * square + 3 * square)
    assert count["words"](7) == 7 * (3 * 6 * square + 3 * 2 * WIDTH * VOCAB)
    assert count["echoes"](5) == 5 * (2 * 2 * 2 * WIDTH + 3 * 2 * square + 3 * square)
    # What `words` reads before its fifth layer trains, itself and what it reads first do not.
    edges = [e for e in model.edges if e.get("tap") == "early"]
    deep = SimpleNamespace(modules=model.modules, edges=edges)
    frozen = needed_flops(deep, rows, ("words",))["words"]
    assert frozen(7) == 7 * (4 * square + 2 * 2 * square + 2 * 2 * WIDTH * VOCAB)
    still = needed_flops(model, rows, set(rows))["words"]
    assert still(7) == 7 * (6 * square + 2 * WIDTH * VOCAB)


@dataclass(frozen=True)
class Untold:
    """Layers with a loop over their rows' tokens and attention that the contract is not told of."""

    n_layers = 2
    tied = False
    inputs = {"entry": ("ids",), "layers": (), "exit": ("weights",)}
    freeze_groups = {"entry": "table", "layers": "stack", "exit": "head"}

    def field_spec(self, name, rows, tokens):
        kind = jnp.int32 if name == "ids" else jnp.float32
        return jax.ShapeDtypeStruct((rows, tokens), kind)

    def init(self, part, key):
        return {"w": jax.random.normal(key, (8, 8))}

    def entry(self, params, batch):
        return jnp.take(params["w"], batch["ids"], axis=0, mode="clip")

    def layer(self, params, x, batch):
        def turn(state, token):
            state = jax.lax.stop_gradient(state) @ params["w"] + token
            return state, state

        x = jax.lax.scan(turn, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)
        scores = jnp.einsum("btd,bsd->bts", x, x)
        return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)

    def exit(self, params, x, batch, entry):
        return {"loss_sum": jnp.sum((x @ params["w"]).sum(-1) * batch["weights"])}


class Told(Untold):
    attention_flops = MappingProxyType({"token": 3.0, "pair": 0.1})


def test_needed_flops_of_loops_and_undeclared_attention():
    model = SimpleNamespace(modules={"m": Untold()}, edges=())
    flops = {f: needed_flops(model, {"m": 32}, f)["m"](20) for f in ((), ("table",), ("stack",))}
    square, pairs = 20 * 2 * 8 * 8, 20**2 * 2 * 2 * 8
    # The state is no gradient's way: in the loop only the matrix has one.
    assert flops[()] == 2 * (2 * square + 3 * pairs) + 3 * square
    assert flops[("table",)] == flops[()]
    assert flops[("stack",)] == 2 * (square + 3 * pairs) + 3 * square
    told = SimpleNamespace(modules={"m": Told()}, edges=())
    assert needed_flops(told, {"m": 32})["m"](20) == 2 * (2 * square + 3 * 100) + 3 * square


# ---- FLOPs of segments' programs ----

SIZE = DecoderSize(64, 4, 4, 2, 160, 512)
DECODER = DecoderModule(SIZE, jnp.dtype("float32"))
N_ROWS, TOKENS = 2, 96
DENSE = N_ROWS * TOKENS * SIZE.n_layers * sum(decoder_products(SIZE))
ATTENTION = N_ROWS * SIZE.n_layers * causal(SIZE, TOKENS)
HEAD_FLOPS = N_ROWS * TOKENS * 2 * SIZE.width * SIZE.vocab


def segment(mesh=(1, 1, 1), microbatches=1, **changes) -> Segment:
    whole = Segment(
        plan=SegmentPlan("text", "text", 0, SIZE.n_layers, "all", True, True),
        module=DECODER,
        mesh=device_mesh(MeshShape(*mesh), jax.devices()),
        microbatches=microbatches,
        trainable=frozenset(("entry", "layers", "exit")),
        wants_gradient=frozenset(("visual",)),
        edges=(Edge("pictures", "text", "visual"),),
    )
    return replace(whole, **changes)


SHAPE = Shape(N_ROWS, TOKENS)


def test_programs_need_every_product_once_and_twice_backward():
    forward = DENSE + ATTENTION + HEAD_FLOPS
    for kind, with_forward, n in (
        (FORWARD, False, 1), (EVALUATE, False, 1), (BACKWARD, False, 2), (BACKWARD, True, 3)
    ):  # fmt: skip
        flops = segment_flops(segment(), SHAPE, kind, with_forward=with_forward)
        assert flops == pytest.approx(n * forward, rel=1e-12)
    s = segment(mesh=(2, 2, 2), microbatches=4)  # data ranks have rows of their own
    flops = segment_flops(s, SHAPE, BACKWARD, with_forward=True)
    assert flops == pytest.approx(3 * forward * 4 / (2 * 2))


@pytest.mark.parametrize("trainable, brought, dense, attention, head", [
    (("exit",), (), 0, 0, 2),  # the norm before the head trains too
    (("layers",), (), 2, 2, 1), ((), ("visual",), 1, 2, 1),
    (("exit",), ("visual",), 1, 2, 2), (("entry",), (), 1, 2, 1),
])  # fmt: skip
def test_frozen_parts_need_no_gradient_of_their_own(trainable, brought, dense, attention, head):
    s = segment(trainable=frozenset(trainable), wants_gradient=frozenset(brought))
    wanted = dense * DENSE + attention * ATTENTION + head * HEAD_FLOPS
    assert segment_flops(s, SHAPE, BACKWARD, with_forward=False) == pytest.approx(wanted)


def test_tokens_padded_for_a_gpu_are_not_needed():
    tower = VisionModule(VisionSize(29, 8, 48, 3, 4, 96), 64, jnp.dtype("float32"))
    tiles, edges = Shape(N_ROWS, 9), (Edge("vision", "llm", "visual"),)
    flops = [
        segment_flops(segment(module=m, edges=edges), tiles, BACKWARD, with_forward=True)
        for m in (tower, tower.on_chip("sm_90"))
    ]
    assert flops[0] == flops[1] > 0


def test_visible_pair_share():
    encoder = VisionModule(VisionSize(32, 8, 48, 3, 4, 96), 64, jnp.dtype("float32"))
    assert visible_pair_share(encoder, 16) == 1.0
    assert visible_pair_share(DECODER, 1) == 1.0
    assert visible_pair_share(DECODER, 3) == pytest.approx(6 / 9)
    assert visible_pair_share(DECODER, 1000) == pytest.approx(0.5, rel=2e-3)
