"""What data ranks share of parameters, against the shardings of segments, and the step's end."""

import dataclasses
import itertools
from math import prod

import jax
import numpy as np
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.profile.measure import build_profile
from dflop_jax.profile.optimizer_state import parameter_dims
from dflop_jax.profile.state import (
    ShardedState,
    optimizer_bytes,
    trained_bytes,
    working_bytes,
)
from dflop_jax.records import LayerTiming, MeshShape, ParamDims, SegmentPlan, Shape
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.module_parts import segment_parts
from dflop_jax.runtime.parameter_layout import grad_structs, param_structs, program_structs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.update import SegmentUpdate
from dflop_jax.train.optimizer import make_optimizer
from models.llava import build
from tests.plans import halved, profile_of

MODEL = build("nano")
SHAPES = {"vision": [Shape(2, 16)], "llm": [Shape(1, 128)]}
TIMINGS = [LayerTiming(m, 1, s[0], 1.0, 1.0, 1.0, 1.0) for m, s in SHAPES.items()]
PROFILE = build_profile(
    MODEL, SHAPES, TIMINGS, key="k", device="d", concurrency=8.0, task_overhead_s=0.0, priced_by=""
)


def held(module: str, mesh: MeshShape, zero: int, devices: int = 0) -> tuple[float, float]:
    """(bytes of parameters, of gradients) on one device, by their shardings."""
    spec = MODEL.modules[module]
    plan = SegmentPlan(
        module, module, 0, spec.n_layers, "m", True, True, "none", zero, shard_devices=devices
    )
    segment = Segment(
        plan, spec, device_mesh(mesh, jax.devices()), 1, frozenset(segment_parts(plan, spec))
    )

    def n_bytes(structs):
        leaves = jax.tree.leaves(structs)
        return 4.0 * sum(prod(s.sharding.shard_shape(s.shape)) for s in leaves)

    return n_bytes(program_structs(segment)), n_bytes(grad_structs(segment))


@pytest.mark.parametrize("module", MODEL.modules)
@pytest.mark.parametrize("data", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_held_is_what_shardings_say(module, data, zero):
    """Also of 3, 5 or 7 ranks, which divide few dims or none."""
    mesh, n_layers = MeshShape(data=data), MODEL.modules[module].n_layers
    plan = SegmentPlan(module, module, 0, n_layers, "m", True, True, "none", zero)
    params, grads = held(module, mesh, zero)
    state = ShardedState(plan, mesh, PROFILE)
    size, shard = state.n_bytes(working_bytes), state.n_bytes(working_bytes, data)
    assert state.state_bytes(trained=True) == pytest.approx(params + grads + 2 * shard)
    assert params == pytest.approx(shard if zero == 3 else size)
    assert grads == pytest.approx(shard if zero >= 2 else size)
    assert state.state_bytes(trained=False) == pytest.approx(params)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_block_of_ranks_holds_all_of_it(zero):
    """Two blocks of 3 ranks hold what 3 ranks do."""
    plan = SegmentPlan("llm", "llm", 0, MODEL.modules["llm"].n_layers, "m", True, True)
    plan = dataclasses.replace(plan, zero=zero, shard_devices=3)
    assert held("llm", MeshShape(data=6), zero, 3) == held("llm", MeshShape(data=3), zero)
    in_blocks, alone = (
        ShardedState(plan, MeshShape(data=n), PROFILE).state_bytes(trained=True) for n in (6, 3)
    )
    assert in_blocks == alone


@pytest.mark.parametrize("devices, model, wanted", [
    (0, 1, [1, 4, 6, 8, 12]),
    (4, 1, [1, 4, 6, 4, 4]),
    (4, 2, [1, 2, 2, 2, 2]),
    (4, 4, [1, 4, 6, 8, 12]),
    (3, 1, [1, 4, 3, 8, 3]),
])  # fmt: skip
def test_ranks_of_a_block(devices, model, wanted):
    """Whole data ranks, several of them, that divide the degree; else there are no blocks."""
    plan = SegmentPlan("m", "m", 0, 1, "m", True, True, shard_devices=devices)
    degrees = np.array([1, 4, 6, 8, 12])
    assert plan.shard_ranks(degrees, model).tolist() == wanted
    assert [plan.shard_ranks(int(n), model) for n in degrees] == wanted


def test_a_ranks_share_by_hand():
    many = (ParamDims((6, 10), split=1), ParamDims((7,)), ParamDims((4, 4), split=0))
    dims = {"layer_dims": {"m": many}, "ends_dims": {"m": ()}}
    profile = profile_of([TIMINGS[0]], {"m": 1}, **dims)
    plan = SegmentPlan("m", "m", 0, 1, "m", True, True)
    ranks = np.array([1, 2, 3, 4, 100])
    got = ShardedState(plan, MeshShape(), profile).n_bytes(working_bytes, ranks)
    assert (got / 4).tolist() == [83, 30 + 4 + 8, 20 + 3 + 6, 15 + 2 + 4, 3]
    # Two tensor ranks have 30, 7 and 8 elements.
    split = ShardedState(plan, MeshShape(model=2), profile)
    assert split.n_bytes(working_bytes, 4, exact=True) / 4 == 8 + 2 + 2


def test_only_gathered_parameters_are_whole_at_the_end():
    plan = SegmentPlan("llm", "llm", 0, MODEL.modules["llm"].n_layers, "m", True, True)
    one, three = (
        {n: ShardedState(of, MeshShape(data=n), PROFILE) for n in (1, 4)}
        for of in (plan, dataclasses.replace(plan, zero=3))
    )
    own, size = (one[4].n_bytes(trained_bytes, n) for n in (4, 1))
    assert three[4].step_end_bytes() == pytest.approx(1.85 * own)
    assert one[4].step_end_bytes() == pytest.approx(3.2 * own + size)
    assert one[1].step_end_bytes() == three[1].step_end_bytes() == size


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("data", [1, 4])
@pytest.mark.parametrize("half", [False, True])
def test_what_is_whole_while_a_task_runs(zero, data, half):
    """By hand: a layer's parameters (3) and gradients (2 and 3), the ends' gradients or, in a task
    that ends in the loss, the parameters that the loss reads."""
    plan = SegmentPlan(
        "llm", "llm", 0, MODEL.modules["llm"].n_layers, "m", True, True, "none", zero
    )
    working, mesh = 0.5 if half else 1.0, MeshShape(data=data)
    state = ShardedState(plan, mesh, PROFILE)
    layer, ends = state.layer_bytes(trained_bytes), state.ends_bytes(trained_bytes)
    loose = dataclasses.replace(halved(PROFILE) if half else PROFILE, tied=())
    moved = (data > 1) * (zero > 1)
    whole = layer * (zero == 3) * working + layer + ends
    state = ShardedState(plan, mesh, loose)
    assert state.gathered_bytes(trained=True, ends_in_loss=False) == moved * whole
    for tied, read in ((), 0.5), (("llm",), 1.0):
        profile = dataclasses.replace(loose, tied=tied)
        want = layer + (layer + read * ends) * working * (zero == 3)
        state = ShardedState(plan, mesh, profile)
        got = state.gathered_bytes(trained=True, ends_in_loss=True)
        assert got == moved * want
    frozen = ShardedState(plan, mesh, loose).gathered_bytes(trained=False, ends_in_loss=False)
    assert frozen == moved * (zero == 3) * working * layer


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_state_is_what_shardings_say(name, dtype):
    """But for counts, to the byte: of degrees that divide dims or none, and of tensor ranks."""
    ema = 0.9 if name == "lion" else 0.0
    tx = make_optimizer(TrainConfig(optimizer=name, moments_dtype=dtype, ema=ema))
    profile = dataclasses.replace(PROFILE, **parameter_dims(MODEL, tx))
    for module, data, model in itertools.product(MODEL.modules, (1, 2, 3), (1, 2)):
        mesh, spec = MeshShape(data=data, model=model), MODEL.modules[module]
        plan = SegmentPlan(module, module, 0, spec.n_layers, "m", True, True)
        trained = frozenset(segment_parts(plan, spec))
        segment = Segment(plan, spec, device_mesh(mesh, jax.devices()), 1, trained)
        structs = jax.tree.leaves(SegmentUpdate(segment, tx, 0.0).state_structs)
        held = sum(
            s.dtype.itemsize * prod(s.sharding.shard_shape(s.shape)) for s in structs if s.ndim
        )
        assert (
            float(ShardedState(plan, mesh, profile).n_bytes(optimizer_bytes, data, exact=True))
            == held
        )


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("data", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_frozen_parts_only_the_parameters_are_held(zero, data, dtype):
    """Adapters train, of the LLM's layers and of the connector; gradients, masters and what the
    optimizer keeps are theirs alone, to the byte."""
    model = build("nano", dtype).with_lora(3, 6.0, targets=("llm", "connector"))
    frozen = ("vision", "connector", "llm")
    tx = make_optimizer(TrainConfig())
    plain = build_profile(
        model, SHAPES, TIMINGS, key="k", device="d", concurrency=8.0, task_overhead_s=0.0,
        priced_by="",
    )  # fmt: skip
    profile = dataclasses.replace(plain, **parameter_dims(model, tx, frozen))
    mesh = MeshShape(data=data)
    for name, module in model.modules.items():
        plan = SegmentPlan(
            name, name, 0, module.n_layers, "m", True, True, "none", zero, shard_devices=0
        )
        trains = frozenset(p for p in segment_parts(plan, module) if "adapter" in p)
        segment = Segment(plan, module, device_mesh(mesh, jax.devices()), 1, trains)
        update = SegmentUpdate(segment, tx, 0.0)
        trees = (
            program_structs(segment),
            grad_structs(segment),
            update.master_structs,
            [s for s in jax.tree.leaves(update.state_structs) if s.ndim],
        )
        state, of_all = (ShardedState(plan, mesh, p) for p in (profile, plain))
        assert state.state_bytes(trained=True) == on_a_device(trees)
        split = MeshShape(data=data, model=2)
        segment = dataclasses.replace(segment, mesh=device_mesh(split, jax.devices()))
        ranks = data if zero == 3 else 1
        state_of_half = ShardedState(plan, split, profile)
        working = state_of_half.n_bytes(working_bytes, ranks, exact=True)
        assert working == on_a_device(program_structs(segment))
        adapters = [tree for p, tree in param_structs(segment).items() if p in trains]
        n_elements = sum(prod(a.shape) for a in jax.tree.leaves(adapters))
        assert state.n_bytes(trained_bytes) == pytest.approx(4 * n_elements)
        assert float(state.step_end_bytes()) < 0.3 * float(of_all.step_end_bytes())
        whole, of_all_whole = (
            float(s.gathered_bytes(trained=True, ends_in_loss=False)) for s in (state, of_all)
        )
        assert whole <= of_all_whole


def on_a_device(structs) -> int:
    """Bytes that a device has of arrays, by their shardings."""
    leaves = jax.tree.leaves(structs)
    return sum(s.dtype.itemsize * prod(s.sharding.shard_shape(s.shape)) for s in leaves)
