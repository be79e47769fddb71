"""A state moved from layout to layout equals the restored checkpoint of it, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import Counter

import jax
import numpy as np
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.runtime import move_state
from dflop_jax.runtime.communicator import Route
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.move_state import Overlap, Region, ShardMove
from dflop_jax.train.optimizer import make_optimizer
from models.llava import build

from . import plain
from .move_cases import check_move, fill

TRAIN = TrainConfig(steps=20, warmup_steps=0)
# name -> (vision (first, stage, data, model), llm, options, (ZeRO, devices that share))
BLOCKS = {"llm": (3, 4), "vision": (2, 4)}  # ZeRO, devices that share
PLANS = {
    "a device each": ((0, 1, 1, 1), (1, 1, 1, 1), {}, {}),
    "segments": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 4}, {}),
    "rounds of stages, ZeRO 3": (
        (0, 1, 4, 1),
        (4, 2, 2, 1),
        {"group_size": 2, "rounds": 2},
        {"vision": 3, "llm": 3},
    ),
    "tp 2, dp 2 on the same": ((0, 1, 2, 2), (0, 1, 2, 2), {}, {"llm": 3}),
    "dp 3, flat shards": ((0, 1, 3, 1), (3, 1, 3, 1), {}, {"vision": 2, "llm": 3}),
    "blocks of 2 of dp 4, tp 2": (
        (0, 1, 4, 2),
        (0, 1, 4, 2),
        {},
        {**BLOCKS},
    ),
}


@functools.cache
def model(dtype: str = "float32", *, tied: bool = False, lora: bool = False):
    nano = build("nano", dtype)
    decoder = dataclasses.replace(nano.size.decoder, tied=tied, n_layers=4)
    nano = dataclasses.replace(nano, size=dataclasses.replace(nano.size, decoder=decoder))
    return nano.with_lora(3, 6.0) if lora else nano


def executor(name: str, m, freeze=(), train=TRAIN) -> Executor:
    vision, llm, options, zero = PLANS[name]
    plan = plain.with_zero(plain.plan_of(m, vision, llm, **options), **zero)
    return Executor(m, plan, make_optimizer(train), clip_norm=1.0, freeze=freeze)


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    "source, target, options",
    [
        ("dp 3, flat shards", "blocks of 2 of dp 4, tp 2", {"dtype": "bfloat16"}),
        ("tp 2, dp 2 on the same", "segments", {"tied": True, "ema": 0.9}),
        ("segments", "rounds of stages, ZeRO 3", {"dtype": "bfloat16", "lora": True}),
        ("rounds of stages, ZeRO 3", "tp 2, dp 2 on the same", {"dtype": "bfloat16"}),
        ("blocks of 2 of dp 4, tp 2", "dp 3, flat shards", {"tied": True}),
        ("a device each", "a device each", {"freeze": ("vision",)}),
        ("a device each", "dp 3, flat shards", {"freeze": ("vision",)}),
    ],
)
def test_a_moved_state_is_the_restored_one(source, target, options, tmp_path):
    options = dict(options)
    train = dataclasses.replace(TRAIN, ema=options.pop("ema", 0.0))
    freeze = options.pop("freeze", ("llm",) if options.get("lora") else ())
    m = model(**options)
    before, after = (executor(name, m, freeze, train) for name in (source, target))
    fill(before, 1)
    move = check_move(before, after, tmp_path, ProcessGroup())
    assert (move.sent_bytes == 0) == (source == target)


def test_the_peak_is_planned_and_held(monkeypatch, tmp_path):
    """Bytes of live arrays during the move, on the fullest device."""
    m = model()
    source, target = executor("tp 2, dp 2 on the same", m), executor("dp 3, flat shards", m)
    gc.collect()
    others, seen = live_bytes(), []
    fill(source, 3)
    state_bytes = sum((live_bytes() - others).values())
    assemble = move_state.assemble_array

    def assemble_and_note(*args):
        seen.append(max((live_bytes() - others).values()))
        return assemble(*args)

    monkeypatch.setattr(move_state, "assemble_array", assemble_and_note)
    move = check_move(source, target, tmp_path, ProcessGroup())
    assert 0.5 * move.peak_bytes < max(seen) <= move.peak_bytes
    assert move.peak_bytes < 0.6 * state_bytes, "four devices hold two copies of a state"


def live_bytes() -> Counter[int]:
    """Bytes of all buffers by device; several arrays may share one."""
    shards = [s for array in jax.live_arrays() for s in array.addressable_shards]
    sizes = {(s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}
    n_bytes = Counter[int]()
    for (device, _), size in sizes.items():
        n_bytes[device] += size
    return n_bytes


@pytest.mark.parametrize(
    "region, other",
    [
        (Region(((1, 3), (0, 1), (2, 14)), (2, 3, 4), ((0, 2), (1, 3), (2, 4))), (2, 2, 2)),
        (Region(((0, 4), (0, 1), (0, 14)), (4, 1, 14), ((3, 4), (0, 1), (0, 0))), (1, 1, 0)),
        (Region(((2, 3), (0, 1), (5, 6)), (), ()), ()),
    ],
    ids=["part of a flat box", "nothing", "one element"],
)
def test_xla_cuts_and_composes_as_numpy(monkeypatch, region, other):
    device, dtype, found = jax.devices()[1], np.float32, []
    shard = jax.device_put(np.arange(4 * 14, dtype=dtype).reshape(4, 1, 14), device)
    piece = jax.device_put(np.full(other, 7, dtype), device)
    for is_host in (True, False):
        monkeypatch.setattr(move_state, "_is_host", lambda device, is_host=is_host: is_host)
        move = ShardMove((device,), shard.shape, (Overlap({}, Route((), (), ()), region),))
        composed = move_state._compose(move, dtype, device, [(region, piece)])
        found.append([move_state._cut(shard, region), composed])
    for by_numpy, by_xla in zip(*found, strict=True):
        assert by_xla.devices() == {device}
        np.testing.assert_array_equal(by_xla, by_numpy)
    span = np.asarray(shard)[tuple(slice(*b) for b in region.span)].reshape(region.box_shape)
    want = span[tuple(slice(*b) for b in region.inner)]
    np.testing.assert_array_equal(found[0][0], want)
    assert np.sum(found[0][1]) == 7 * piece.size
