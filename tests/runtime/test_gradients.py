"""The matrix of gradients: graph x layout x recompute policy x ZeRO degree x frozen parts.

One step of every case gives the loss and the gradients of the plain computation on one device.
Every layout is compiled once, with one value of each other axis. `tests.golden` stores gradients of
the same layouts without recompute.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dflop_jax.contract import edges_of
from dflop_jax.plan.placement import split_layers
from dflop_jax.records import Bucket, Layout, Plan, Prices, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.runtime import parameter_layout, segment
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import param_zero_specs, state_zero_specs
from dflop_jax.simulate.steps import simulate_step, with_list_order
from models.composed import Composition
from models.llava import build
from models.qwen3_5_decoder import HybridModule
from models.qwen3_5_sizes import QWEN3_5
from tests.mixed import HandingText, Mixed
from tests.plans import programs
from tests.small import WIDTH, Small, Text, before

from . import plain

N = 12
KEY_BIAS = "['vision']['layers']['key']['bias']"
NANO = build("nano")


@dataclasses.dataclass(frozen=True)
class Hybrid(Composition):
    """LLaVA's tower before the decoder of Qwen3.5: gated delta nets and gated attention."""

    @property
    def plain(self):
        size = dataclasses.replace(QWEN3_5["qwen3.5-nano"].decoder, mrope_sections=())
        return {**super().plain, "llm": HybridModule(size, self.dtype)}


class NnxText(Text):
    """Layers of Flax NNX, split and merged: the engine sees a pytree."""

    def init(self, part, key):
        if part != "layers":
            return super().init(part, key)
        return nnx.to_pure_dict(nnx.state(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))))

    def logical_axes(self, part):
        layer = {"kernel": (None, None), "bias": (None,)}
        return layer if part == "layers" else super().logical_axes(part)

    def layer(self, params, x, batch):
        linear = nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(linear)
        nnx.replace_by_pure_dict(state, params)
        return x + jnp.tanh(nnx.merge(graph, state)(x + before(x, batch["segment_ids"])))


class Nnx(Small):
    @property
    def modules(self):
        return {**super().modules, "llm": NnxText(self.n_layers, self.tied)}


HYBRID = Hybrid(NANO.size, NANO.dtype)
DEEP = Small(n_layers=12, n_encoder_layers=4)  # enough for several rounds
HANDING = Mixed(pattern="mmgmmg", text=HandingText)  # layers of two kinds that pass a tree on
ROUNDS = Mixed(pattern="mgmgmgmg", text=HandingText)
ODD = Mixed(tied=False, pattern="gmmmgmm")  # a period that begins anywhere, then exceptions


@functools.cache
def oracle(m):
    """(samples, modules' parameters, loss, gradients) of a model, computed plainly."""
    samples = plain.random_samples(m, N, 1)
    plan = plain.plan_of(m, (0, 1, 1, 1), (1, 1, 1, 1))
    params = plain.fresh_params(m, plan)
    return samples, params, *plain.plain_loss_and_grads(m, params, samples)


def grads_of(m, plan, samples, schedule, *, change=lambda ex: None, draws="", scales=None,
             **kwargs):  # fmt: skip
    """(loss, gradients as the reduction gives them, parameters, result) of one step; `change` is
    made to the initial state. An evaluation gives the same sums if the executor `evaluates`."""
    ex = Executor(m, plan, optax.sgd(1.0), **kwargs)
    try:
        ex.init(0)
        change(ex)
        segments = ex.programs.segments.items()
        held, split = (
            {n: of(s) for n, s in segments} for of in (param_zero_specs, state_zero_specs)
        )
        params = plain.join(plan, ex.state.params, held)
        ex.compile()
        arrays = plain.pack(m, plan, schedule, samples, draws)
        scales = scales or plain.scales_of(arrays)
        captured = keep_reduced(ex, ex.trainable, np.asarray)
        evaluates = kwargs.get("evaluates")
        evaluated = ex.run_evaluation(schedule, arrays).result().sums if evaluates else None
        result = ex.run_step(schedule, arrays, scales).result()
        assert evaluated is None or evaluated == pytest.approx(result.sums, rel=1e-5)
        return (
            sum(result.sums[f"{name}.loss_sum"] * scale for name, scale in scales.items()),
            plain.join(plan, captured, split),
            params,
            result,
        )
    finally:
        ex.close()


def keep_reduced(ex, segments, read=lambda leaf: leaf):
    """What the reduction gives of these segments' gradients, once a step has run."""
    captured: dict = {}
    for n in segments:

        def spy(grads, more, n=n, program=ex.programs.compiled[n, "reduce"]):
            out = program(grads, more)
            own = ex.programs.segments[n].owned_parts
            captured[n] = jax.tree.map(read, {p: t for p, t in out[0].items() if p in own})
            return out

        ex.programs.compiled[n, "reduce"] = spy
    return captured


def assert_trees_close(got, want, tolerance=1e-5):
    """Per leaf, relative to its largest entry.

    The vision key bias has no gradient in exact arithmetic (softmax ignores a shift), so both
    sides hold rounding noise there: it only has to be negligible.
    """
    flat = jax.tree_util.tree_leaves_with_path(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    largest = max((np.abs(w).max() for _, w in flat), default=0)
    for (path, w), g in zip(flat, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        if name == KEY_BIAS:
            assert max(np.abs(w).max(), np.abs(g).max()) <= 1e-6 * largest
        else:
            assert np.abs(g - w).max() <= tolerance * np.abs(w).max(), name


def check_step(m, plan, schedule, *, freeze=(), tolerance=1e-5):
    """Assert that a step gives the plain loss and the plain gradients of what trains; returns
    (gradients, result)."""
    samples, params, want_loss, want = oracle(m)
    loss, grads, start, result = grads_of(m, plan, samples, schedule, freeze=freeze)
    assert_trees_close(start, params, 1e-6)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_trees_close(grads, trained(m, want, freeze), tolerance)
    return grads, result


def trained(m, params, freeze):
    """By module, the parts that are not frozen."""
    return {
        name: {p: t for p, t in parts.items() if m.modules[name].freeze_groups[p] not in freeze}
        for name, parts in params.items()
    }


def assert_norm(result, grads):
    squares = sum(np.square(g).sum() for g in jax.tree.leaves(grads))
    assert result.grad_norm == pytest.approx(np.sqrt(squares), rel=1e-5)


# name -> (vision (first, stage, data, model), llm, options)
PLANS = {
    "2+6, tp 2 and dp 3 x tp 2": ((0, 1, 1, 2), (2, 1, 3, 2), {}),
    "4+4, dp 4 and tp 2 x dp 2": ((0, 1, 4, 1), (4, 1, 2, 2), {}),
    "llm stage 2, dp 2, tp 2 on 8, shared": ((0, 1, 8, 1), (0, 2, 2, 2),
                                             {"group_size": 2, "rounds": 2}),
    "4+4, tp 2 x dp 2 and dp 4": ((0, 1, 2, 2), (4, 1, 4, 1), {}),
    "llm stage 2": ((0, 1, 2, 1), (2, 2, 1, 1), {"group_size": 2}),
    "llm stage 4, twice as many": ((0, 1, 1, 2), (2, 4, 1, 1), {"group_size": 8}),
    "vision stage 2, 4 times as many": ((0, 2, 2, 1), (4, 1, 2, 1), {"group_size": 8}),
    "llm as 3 segments": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 3}),
    "llm as 3 segments, untied": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 3, "tied": False}),
    "tied across segments of dp 2 x tp 2": ((0, 1, 2, 1), (0, 1, 2, 2), {"llm_segments": 2}),
    "three groups feed one": ((0, 1, 2, 1), (2, 1, 2, 1), {"fan_in": 3}),
    "two groups of stage 2 read one": ((0, 1, 2, 1), (2, 2, 1, 1),
                                       {"group_size": 2, "fan_in": 2, "divided_readers": ("llm",)}),
    "two groups feed one, stage 2": ((0, 1, 2, 1), (2, 2, 1, 1),
                                     {"group_size": 4, "fan_in": 2, "rounds": 2}),
    "same mesh": ((0, 1, 4, 2), (0, 1, 4, 2), {}),
    "same devices, other shape": ((0, 1, 8, 1), (0, 1, 2, 2), {"bucket": (36, 239)}),
    "one device": ((0, 1, 1, 1), (0, 1, 1, 1), {}),
    "gpipe": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 2, "order": "gpipe"}),
    "rows": ((0, 1, 2, 1), (2, 1, 2, 1), {"rows": 2}),
    "3+5, dp 3 and 5": ((0, 1, 3, 1), (3, 1, 5, 1), {}),
    "dp 7 and 6, shared": ((0, 1, 7, 1), (0, 1, 6, 1), {}),
    "dp 5, llm stage 2 of dp 3": ((0, 1, 5, 1), (0, 2, 3, 1), {"group_size": 2}),
    "blocks of dp 6 and 2 x tp 2": ((0, 1, 6, 1), (0, 1, 4, 2), {}),
    "blocks of dp 6, llm stage 2 of dp 4": ((0, 1, 6, 1), (0, 2, 4, 1),
                                            {"group_size": 2, "rounds": 2}),
}  # fmt: skip
# What some of them split over data ranks: of 3, 5, 6 and 7 ranks most parameters are held flat.
ZERO = {
    "2+6, tp 2 and dp 3 x tp 2": {"llm": 3},
    "3+5, dp 3 and 5": {"vision": 3, "llm": 2},
    "dp 7 and 6, shared": {"vision": 1, "llm": 3},
    "dp 5, llm stage 2 of dp 3": {"vision": 3, "llm": 3},
    # Blocks of two, two and three data ranks.
    "blocks of dp 6 and 2 x tp 2": {"vision": (1, 2), "llm": (3, 4)},
    "blocks of dp 6, llm stage 2 of dp 4": {"vision": (3, 3), "llm": (2, 2)},
    "4+4, dp 4 and tp 2 x dp 2": {"vision": 3, "llm": 2},
    "llm stage 2, dp 2, tp 2 on 8, shared": {"vision": 2, "llm": 3},
    "tied across segments of dp 2 x tp 2": {"vision": 2, "llm": 3},
    "same mesh": {"vision": 3, "llm": 3},
    "rows": {"vision": 1, "llm": 2},
}


def planned(case, m=None):
    """(a model, the small one if none is given, a plan for it)."""
    vision, llm, options = case
    options = dict(options)
    sizes = {k: options.pop(k) for k in ("tied", "n_layers") if k in options}
    m = m or Small(**sizes)
    return m, plain.plan_of(m, vision, llm, **({"bucket": (36, 240)} | options))


def chunked(m, ranks, rounds, parts, *, data=1, model=1):
    """A plan with `rounds` chunks of each module on every rank, and `parts` sub-microbatches."""
    size = data * model
    submeshes = tuple(SubmeshPlan(f"rank{r}", r * size, 1, data, model) for r in range(ranks))
    segments = []
    for module, k in rounds.items():
        runs = split_layers(m.modules[module].n_layers, ranks * k)
        for i, (a, b) in enumerate(runs):
            ends = i == 0, i == len(runs) - 1
            rank = f"rank{i % ranks}"
            segments.append(SegmentPlan(f"{module}{i}", module, a, b, rank, *ends))
    row, tiles = Shape(1, 240), Shape(-(-36 // parts), m.piece_tokens["vision"])
    buckets = (Bucket.from_shapes({"vision": tiles, "llm": row}), Bucket.from_shapes({"llm": row}))
    tied = ("llm",) if m.tied else ()
    layout = Layout(submeshes, tuple(segments), buckets, edges=edges_of(m), fan_in=parts, tied=tied)
    return Plan("dip", layout)


# name -> (model, arguments of `chunked`)
CHUNKED = {
    "chunks on 2 ranks, 1 and 2 rounds": (Small(), (2, {"vision": 1, "llm": 2}, 2), {}),
    "chunks on 2 ranks of tp 2": (Small(False, 6, 4), (2, {"vision": 2, "llm": 3}, 4),
                                  {"model": 2}),
    "chunks on 4 ranks of dp 2": (DEEP, (4, {"vision": 1, "llm": 3}, 3), {"data": 2}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """The other axes of the matrix for one layout."""

    graph: object = None  # None: the small model
    remats: tuple[str, ...] = ("none",)  # of the segments, in turn
    freeze: tuple[str, ...] = ()
    less_remat: bool = False  # every other group runs some under a second policy, that saves all
    unrolled: int = 0  # up to how many layers of a stage are unrolled
    tolerance: float = 1e-5


# A fresh net's states are small beside their rounding, which its norm amplifies.
NET_TOLERANCE = 3e-4
ALL = ("none", "layers", "segment", "dots", "named")
# Layout -> its case; `make test` runs the first ones. Layouts that are not here have none of this.
CASES = {
    "llm stage 2, dp 2, tp 2 on 8, shared": Case(ROUNDS, ("layers", "dots")),
    "tied across segments of dp 2 x tp 2": Case(None, ("named", "layers", "segment"), unrolled=8),
    "llm as 3 segments, untied": Case(ODD, ALL[1:], unrolled=8),
    "two groups feed one, stage 2": Case(None, ("layers", "named"), less_remat=True),
    "chunks on 2 ranks, 1 and 2 rounds": Case(None, ("layers",), less_remat=True),
    "blocks of dp 6 and 2 x tp 2": Case(HANDING, ("named",), ("vision",)),
    "3+5, dp 3 and 5": Case(ODD, ("dots",), ("vision", "connector")),
    "2+6, tp 2 and dp 3 x tp 2": Case(HYBRID, ALL[1:], tolerance=NET_TOLERANCE),
    "llm stage 4, twice as many": Case(ROUNDS, ("dots", "segment"), unrolled=8),
    "same devices, other shape": Case(NANO, ("none", "named")),
    "same mesh": Case(HYBRID, ("layers",), tolerance=NET_TOLERANCE),
    "gpipe": Case(HYBRID, ("layers", "none", "segment"), tolerance=NET_TOLERANCE),
    "rows": Case(HANDING, ALL[1:], ("gates",)),
    "llm as 3 segments": Case(NANO, ("dots", "named", "segment", "layers")),
    "4+4, dp 4 and tp 2 x dp 2": Case(None, ("segment",), ("vision", "llm")),
    "one device": Case(Nnx(), ("layers",)),
    "llm stage 2": Case(HANDING, ("named", "layers"), ("llm",)),
    "dp 7 and 6, shared": Case(None, ("layers", "dots"), unrolled=8),
    "chunks on 2 ranks of tp 2": Case(None, ALL, less_remat=True),
    "chunks on 4 ranks of dp 2": Case(None, ("none", "segment"), ("vision",), less_remat=True),
}
NAMES = [*CASES, *(name for name in PLANS if name not in CASES)]


def matrix_plan(name, case):
    """(model, plan) of a case."""
    if name in CHUNKED:
        m, arguments, options = CHUNKED[name]
        plan = chunked(m, *arguments, **options)
    else:
        m, plan = planned(PLANS[name], case.graph)
        plan = plain.with_zero(plan, **ZERO.get(name, {}))
    segments = []
    for s, remat in zip(plan.layout.segments, itertools.cycle(case.remats)):
        less = "none" if case.less_remat and remat != "none" else None
        segments.append(dataclasses.replace(s, remat=remat, remat_less=less))
    return m, plan.with_layout(segments=tuple(segments))


def with_less_remat(plan, schedule):
    """The schedule with two of three groups under the second policy in segments by turns, the rest
    in all of them."""
    second = [s.name for s in plan.layout.segments if s.remat_less]
    groups = tuple(
        dataclasses.replace(g, remat_less=tuple(second[i % 2 :: 2]) if i % 3 else tuple(second))
        for i, g in enumerate(schedule.groups)
    )
    return dataclasses.replace(schedule, groups=groups)


def tasks_of(trace, submesh):
    """What a submesh ran, in its order."""
    events = sorted(trace.events, key=lambda e: e.start_s)
    return [(e.segment, e.group, e.direction) for e in events if e.submesh == submesh]


@pytest.mark.slow(first=7)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_every_layout_equals_the_plain_computation(name, monkeypatch):
    case = CASES.get(name, Case())
    monkeypatch.setattr(segment, "max_unrolled_layers", lambda chip: case.unrolled)
    monkeypatch.setattr(parameter_layout, "MIN_SPLIT_ELEMENTS", 100)  # some of a layer's arrays
    m, plan = matrix_plan(name, case)
    schedule = plain.random_schedule(plan, oracle(m)[0], 2, seed=len(name), text_only=(0,))
    schedule = with_less_remat(plan, schedule) if case.less_remat else schedule
    trains = [s.name for s in plan.layout.segments if s.module not in case.freeze or s.last]
    if name in CHUNKED:
        schedule = with_list_order(plan, schedule, Prices(programs(plan)), trains)
    grads, result = check_step(m, plan, schedule, freeze=case.freeze, tolerance=case.tolerance)
    # A module without a gradient runs no backward.
    ran = {e.segment.rstrip("0123456789") for e in result.trace.events if e.direction == "backward"}
    assert ("vision" in ran) == bool(grads["vision"])
    if name in CHUNKED:  # the simulated trace has the same tasks in the same order on every rank
        trace = simulate_step(plan, schedule, Prices(programs(plan)), trains)
        for rank in plan.layout.submeshes:
            assert tasks_of(result.trace, rank.name) == tasks_of(trace, rank.name)


@pytest.mark.slow
def test_bfloat16_step_is_close():
    """Under tensor parallelism, data parallelism and stages at once."""
    samples, _, want_loss, want = oracle(NANO)
    half = dataclasses.replace(NANO, dtype=jnp.dtype("bfloat16"))
    plan = plain.plan_of(half, (0, 1, 1, 2), (0, 2, 2, 2), group_size=2, bucket=(36, 240))
    schedule = plain.random_schedule(plan, samples, 2, seed=3, text_only=(0,))
    loss, grads, _, _ = grads_of(half, plan, samples, schedule)
    assert loss == pytest.approx(want_loss, rel=1e-2)
    for got, exact in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert got.dtype == np.float32  # accumulated in float32
        if np.abs(exact).max() > 1e-3:
            assert np.abs(got - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("pattern, rounds", [("mmgm", 1), ("mgmgmmgg", 2)])
def test_stages_of_other_kinds_are_refused(pattern, rounds):
    m = Mixed(pattern=pattern)
    plan = plain.plan_of(m, (0, 1, 1, 1), (0, 2, 1, 1), group_size=2, rounds=rounds)
    with pytest.raises(ValueError, match=r"same sequence of kinds.* 2 stages.*cut it"):
        make_segments(m, plan.layout, jax.devices())


def test_everything_frozen_is_refused():
    plan = plain.plan_of(Small(), (0, 1, 1, 1), (1, 1, 1, 1))
    with pytest.raises(ValueError, match="nothing is left to train"):
        Executor(Small(), plan, optax.sgd(1.0), freeze=("vision", "connector", "llm"))
    with pytest.raises(ValueError, match="cannot freeze"):
        Executor(Small(), plan, optax.sgd(1.0), freeze=("audio",))


def test_text_only_plan_without_encoder():
    m = Small()
    samples = plain.random_samples(m, 6, 5, max_tiles=0)
    plan = plain.plan_of(m, None, (0, 1, 2, 1), bucket=(0, 96))
    schedule = plain.random_schedule(plan, samples, 2, seed=0)
    loss, grads, params, _ = grads_of(m, plan, samples, schedule)
    want_loss, want = plain.plain_loss_and_grads(m, params, samples)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_trees_close(grads["llm"], want["llm"])
