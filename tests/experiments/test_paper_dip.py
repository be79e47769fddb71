"""DIP's results from end to end, on a model small enough for a test."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflop_jax.records import Load
from experiments.paper import cases, dip, systems
from experiments.paper.cases import Case, answer, mean_s
from models import omni


@dataclass(frozen=True)
class Model:
    def __call__(self):
        return omni.build("omni-nano", "bfloat16")


@dataclass(frozen=True)
class Drawn:
    def __call__(self, n, seed):
        rng, size = np.random.default_rng(seed), Model()().piece_tokens
        return [
            Load(
                {
                    "vision": (size["vision"],) * int(rng.integers(0, 4)),
                    "audio": (size["audio"],) * int(rng.integers(0, 2)),
                    "llm": (int(rng.integers(64, 512)),),
                }
            )
            for _ in range(n)
        ]


TINY = Case("VLM-tiny", Model(), Drawn(), 4, 16)


@pytest.fixture(scope="module", autouse=True)
def small_profiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "SEEN", 64)
        patch.setattr(systems, "DEGREES", (1, 2))
        patch.setattr(systems, "ITEMS", (1, 8))
        patch.setattr(systems, "TOKENS", (512, 2048))
        yield


def test_dip_beside_its_baseline_and_part_by_part():
    found, parts = dip.run([TINY]), dip.ablation([TINY])
    base, best = answer(TINY, "megatron"), answer(TINY, "dip")
    assert base.fits, base.words
    assert best.fits, best.words
    assert 0 <= best.idle_share < 1
    assert found.bars["DIP"] == [pytest.approx(base.step_s / best.step_s)]
    _, paper = parts.rows
    assert paper[1:] == ["26.13 (1.00x)", "22.27 (1.17x)", "18.81 (1.39x)", "17.61 (1.48x)"]
    assert parts.bars["reordering"] == [pytest.approx(best.step_s / base.step_s)]
    divided = replace(best.plan, fan_in=max(2, best.plan.fan_in))
    whole = dip.whole_groups(TINY, divided)
    assert whole.fan_in == 1
    assert {m: s.tokens for b in whole.buckets for m, s in b.shapes} == {
        m: s.tokens for b in divided.buckets for m, s in b.shapes
    }
    plain = dip.textbook(TINY, best.plan, best.steps)
    assert [s.schedule.groups for s in plain] == [s.schedule.groups for s in best.steps]
    assert mean_s(best.steps) <= mean_s(plain) * (1 + 1e-9)


def test_what_does_not_fit_is_said():
    small = replace(TINY, hardware=replace(TINY.hardware, memory_bytes=1e4))
    for policy in ("megatron", "dip"):
        nothing = answer(small, policy)
        assert not nothing.fits
        assert "GiB" in nothing.words
