"""What is measured, by whom, and under which name it is kept; never how long it took."""

import jax
import pytest

from dflop_jax.profile.measure import model_profile, profile_key, time_layers
from dflop_jax.records import ModuleShape
from dflop_jax.train.prepare import _compute_apart
from models.llava import build

SHAPES = {"vision": [ModuleShape(2, 16)], "llm": [ModuleShape(1, 32)]}


@pytest.fixture(scope="module")
def nano():
    return build("nano")


def test_shares_of_the_work_make_the_whole(nano):
    devices = jax.devices()[:1]
    parts = [time_layers(nano, SHAPES, [1], devices, share=(i, 2), repeats=1) for i in (0, 1)]
    assert [[t.module for t in part] for part in parts] == [["vision"], ["llm"]]
    assert time_layers(nano, SHAPES, [1], devices, share=(2, 3), repeats=1) == []
    profile = model_profile(nano, SHAPES, parts[0] + parts[1], devices, key="k")
    assert {(t.module, t.shape) for t in profile.timings} == {(m, s[0]) for m, s in SHAPES.items()}
    assert all(t.layer_backward_s > 0 for t in profile.timings)


def test_a_profile_is_named_by_the_programs_it_timed(nano):
    devices = jax.devices()[:1]
    key = profile_key(nano, devices, SHAPES, "more")
    assert key == profile_key(build("nano"), devices, SHAPES, "more")
    half = profile_key(build("nano", "bfloat16"), devices, SHAPES, "more")
    longer = profile_key(nano, devices, {**SHAPES, "llm": [ModuleShape(1, 64)]}, "more")
    assert len({key, half, longer, profile_key(nano, devices, SHAPES)}) == 4


class Hub:
    """Process 0 of several; the others say what they are given."""

    def __init__(self, *others):
        self.others = others

    def gather(self, key, value):
        return [value, *self.others]

    def share(self, key, value):
        return value


def test_processes_compute_apart_unless_they_share_a_core(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3}, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert _compute_apart(devices, Hub())
    assert _compute_apart(devices, Hub(b'["here/4"]', b'["there/3"]'))
    assert not _compute_apart(devices, Hub(b'["here/2", "here/3"]'))
