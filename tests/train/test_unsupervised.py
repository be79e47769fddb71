"""Steps without a supervised token are named once and counted; a run of nothing else is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from dflop_jax import DataConfig
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.train import step_log

from .resume_cases import CONFIG, _in_a_folder_of_its_own, fit, quick  # noqa: F401

ANSWER = "Yes."


def run(n, *, weight, steps, batch):
    """A run on `n` records of which one has an answer of that weight, the others of none."""
    records = []
    for k in range(n):
        answer = {"from": "gpt", "value": ANSWER, **({"weight": weight} if not k else {"loss": 0})}
        records.append({"id": str(k), "conversations": [{"from": "human", "value": "?"}, answer]})
    Path("records.json").write_text(json.dumps(records))
    data = DataConfig(path="records.json", max_tokens=96, workers=1)
    train = dataclasses.replace(
        CONFIG.train, steps=steps, global_batch=batch, eval_samples=0, eval_every=0
    )
    return fit("run", data=data, train=train)


def named(caplog):
    return [r.getMessage() for r in caplog.records if "supervised" in r.getMessage()]


def test_tokens_with_a_weight_count_and_steps_without_are_named_once(caplog, capsys):
    run(4, weight=0.01, steps=4, batch=1)
    tokens = [r["supervised_tokens"] for r in read_metrics("run")]
    assert sorted(tokens) == [0, 0, 0, len(ANSWER) + 1]
    first = tokens.index(0)
    assert named(caplog) == [f"step {first} has no supervised token; others are counted at the end"]
    assert "3 of 4 steps had no supervised token" in capsys.readouterr().err


@pytest.mark.parametrize("steps, fewest, rows", [(3, 256, 3), (9, 8, 4)])
def test_a_run_without_any_is_refused(caplog, monkeypatch, steps, fewest, rows):
    monkeypatch.setattr(step_log, "MIN_SAMPLES", fewest)
    with pytest.raises(ValueError, match=r"none of the first \d samples .* give answers a weight"):
        run(4, weight=0.0, steps=steps, batch=2)
    assert len(read_metrics("run")) == rows
    assert len(named(caplog)) == 1
