"""Training with separate submeshes and a loop, against the plan of `auto`."""

from dataclasses import replace

import pytest

from dflop_jax import DataConfig, ModelConfig, TrainConfig, Trainer
from dflop_jax.report.run_folder import read_metrics, read_plan
from experiments import separate_submeshes
from tests.plans import nano_profile


@pytest.mark.slow
def test_losses_equal_those_of_auto(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    losses = {}
    for name in separate_submeshes.RUNS:
        config = replace(
            separate_submeshes.config(name),
            model=ModelConfig(size="nano"),
            data=DataConfig(n_samples=64, max_tiles=1, max_frames=2, max_tokens=72),
            train=TrainConfig(steps=5, global_batch=8, warmup_steps=2),
        )
        losses[name] = Trainer(config, profile=nano_profile()).fit().losses
    assert losses["separate"] == pytest.approx(losses["auto"], rel=1e-6)
    assert losses["auto"][-1] < losses["auto"][0]
    layout = read_plan(config.run_dir).layout
    first, *_, last = ({*layout.submesh(s.submesh).devices} for s in layout.segments)
    assert first.isdisjoint(last)
    assert max(m.stage for m in layout.submeshes) == 2
    separate_submeshes.show(losses)
    printed = capsys.readouterr().out
    median_ms = sorted(row["step_s"] for row in read_metrics(config.run_dir)[3:])
    assert "no loop" in printed
    assert f"{1e3 * sum(median_ms) / 2:.0f}" in printed
