"""One of the papers' results from end to end on a small model."""

from dataclasses import dataclass

import numpy as np
import pytest

from dflop_jax.records import Load
from experiments.paper import dflop, report, results, setups
from experiments.paper.cases import Case
from experiments.paper.evaluation import DFLOP, MEGATRON, PYTORCH, evaluate
from models.llava import build


@dataclass(frozen=True)
class Nano:
    def __call__(self):
        return build("anyres-nano", "bfloat16")


@dataclass(frozen=True)
class Drawn:
    def __call__(self, n, seed):
        rng, tile = np.random.default_rng(seed), Nano()().piece_tokens["vision"]
        both = rng.integers((0, 64), (6, 512), (n, 2)).tolist()
        return [Load({"vision": (tile,) * tiles, "llm": (tokens,)}) for tiles, tokens in both]


TINY = Case("tiny + nano", Nano(), Drawn(), 8, 32, setups.CLUSTER)


pytestmark = pytest.mark.usefixtures("small_profiles")


@pytest.mark.slow
def test_an_experiment_runs_and_is_reported(tmp_path, capsys):
    result = dflop.compare_nodes(TINY, nodes=(1,))
    assert [row[:2] for row in result.rows] == [["1", "256"], ["1", "32"]]
    for batch in (256, 32):
        case = dflop.resize_case(TINY, 1, batch)
        evaluations = p, m, d = [evaluate(case, s) for s in (PYTORCH, MEGATRON, DFLOP)]  # cached
        assert all(0 <= a.idle_share < 1 and a.idle_device_s >= 0 for a in evaluations)
        assert all(len(a.steps) == case.batches for a in evaluations)
        row = next(row for row in result.rows if row[1] == str(batch))
        assert row[2:5] == [f"{batch / a.step_s:.2f}" for a in evaluations]
        assert row[5:] == [f"{a.step_s / d.step_s:.2f}x" for a in (p, m)]
    results.print_result(result)
    assert "the gap widens with nodes" in capsys.readouterr().out
    report.draw_bars(result, tmp_path / "scaling.png")
    page = report.write_timelines(TINY, tmp_path)
    text = report.write_report([result], tmp_path, page, 1.0).read_text(encoding="utf-8")
    for row in result.rows:
        assert "| " + " | ".join(row) + " |" in text
    assert "![" + result.title + "](scaling.png)" in text
    assert "CC BY 4.0" in text
    assert (tmp_path / "scaling.png").stat().st_size > 5000
    html = page.read_text(encoding="utf-8")
    assert "pytorch, simulated" in html
    assert "arrival" in html
