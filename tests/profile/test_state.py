"""What data ranks share of parameters, against the shardings of segments, and the step's end."""

import dataclasses
import itertools
from math import prod

import jax
import numpy as np
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.profile.roofline import build_profile
from dflop_jax.profile.state import ShardedState
from dflop_jax.profile.traced_parts import parameter_dims
from dflop_jax.records import LayerTiming, MeshShape, SegmentPlan, Shape
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.module_parts import segment_parts
from dflop_jax.runtime.parameter_layout import grad_structs, program_structs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.update import SegmentUpdate
from dflop_jax.train.optimizer import make_optimizer
from models.llava import build

MODEL = build("nano")
SHAPES = {"vision": [Shape(2, 16)], "llm": [Shape(1, 128)]}
TIMINGS = [LayerTiming(m, 1, s[0], 1.0, 1.0, 1.0, 1.0) for m, s in SHAPES.items()]


def assembled_profile(model):
    return build_profile(
        model, SHAPES, TIMINGS, key="k", device="d", concurrency=8.0, task_overhead_s=0.0,
        priced_by="",
    )  # fmt: skip


PROFILE = assembled_profile(MODEL)


@pytest.mark.parametrize("devices, model, wanted", [
    (0, 1, [1, 4, 6, 8, 12]), (4, 1, [1, 4, 6, 4, 4]), (4, 2, [1, 2, 2, 2, 2]),
    (4, 4, [1, 4, 6, 8, 12]), (3, 1, [1, 4, 3, 8, 3]),
])  # fmt: skip
def test_ranks_of_a_block(devices, model, wanted):
    """Whole data ranks, several of them, that divide the degree; else there are no blocks."""
    plan = SegmentPlan("m", "m", 0, 1, "m", True, True, shard_devices=devices)
    degrees = np.array([1, 4, 6, 8, 12])
    assert plan.shard_ranks(degrees, model).tolist() == wanted
    assert [plan.shard_ranks(int(n), model) for n in degrees] == wanted


def test_a_tied_task_with_a_loss_gathers_both_ends():
    """Half of them if they are not tied; the rest is in `test_fit.test_peak_bytes_by_hand`."""
    n_layers = MODEL.modules["llm"].n_layers
    plan = SegmentPlan("llm", "llm", 0, n_layers, "m", True, True, "none", 3)
    loose, tied = (
        ShardedState(plan, MeshShape(data=4), dataclasses.replace(PROFILE, tied=tied))
        for tied in ((), ("llm",))
    )
    more = tied.gathered_bytes(trained=True, ends_in_loss=True)
    more -= loose.gathered_bytes(trained=True, ends_in_loss=True)
    assert more == loose.ends_bytes("working_bytes") / 2 > 0


def segment_on(module, name, mesh, zero=1, trains=None, **options):
    """A module as one segment on a mesh: (its plan, the segment)."""
    plan = SegmentPlan(name, name, 0, module.n_layers, "m", True, True, zero=zero, **options)
    trained = frozenset(segment_parts(plan, module)) if trains is None else trains
    return plan, Segment(plan, module, device_mesh(mesh, jax.devices()), 1, trained)


def device_bytes(structs) -> int:
    """Bytes of arrays on a device by their shardings, without counts."""
    leaves = [s for s in jax.tree.leaves(structs) if s.ndim]
    return sum(s.dtype.itemsize * prod(s.sharding.shard_shape(s.shape)) for s in leaves)


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_bytes_match_the_shardings(name, dtype):
    """To the byte: of degrees that divide dims or none, and of tensor ranks."""
    ema = 0.9 if name == "lion" else 0.0
    tx = make_optimizer(TrainConfig(optimizer=name, moments_dtype=dtype, ema=ema))
    profile = dataclasses.replace(PROFILE, **parameter_dims(MODEL, tx))
    for module, data, tp in itertools.product(MODEL.modules, (1, 2, 3), (1, 2)):
        mesh = MeshShape(data=data, model=tp)
        plan, segment = segment_on(MODEL.modules[module], module, mesh)
        want = device_bytes(SegmentUpdate(segment, tx, 0.0).state_structs)
        state = ShardedState(plan, mesh, profile)
        assert float(state.n_bytes("element_state_bytes", data, exact=True)) == want


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("data, shard_devices", [(1, 0), (3, 0), (4, 0), (6, 3)])
@pytest.mark.parametrize("dtype, lora", [("float32", False), ("float32", True), ("bfloat16", True)])
def test_state_bytes_match_the_shardings(zero, data, shard_devices, dtype, lora):
    """To the byte: parameters, gradients, masters and optimizer state, also of ranks that divide
    few dims, of blocks of ranks, and where only adapters of layers and connector train."""
    tx, frozen, model = make_optimizer(TrainConfig()), (), build("nano", dtype)
    if lora:
        model = model.with_lora(3, 6.0, targets=("llm", "connector"))
        frozen = ("vision", "connector", "llm")
    untrained = assembled_profile(model)
    profile = dataclasses.replace(untrained, **parameter_dims(model, tx, frozen))
    mesh = MeshShape(data=data)
    for name, module in model.modules.items():
        trains = frozenset(p for p, group in module.freeze_groups.items() if group not in frozen)
        plan, segment = segment_on(
            module, name, mesh, zero, trains if lora else None, shard_devices=shard_devices
        )
        update = SegmentUpdate(segment, tx, 0.0)
        structs = program_structs(segment), grad_structs(segment)
        structs = *structs, update.master_structs, update.state_structs
        state = ShardedState(plan, mesh, profile)
        assert state.state_bytes(trained=True) == pytest.approx(device_bytes(structs))
        assert state.state_bytes(trained=False) == device_bytes(structs[0])
        assert state.step_end_bytes <= ShardedState(plan, mesh, untrained).step_end_bytes
