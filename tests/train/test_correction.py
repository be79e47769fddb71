"""What a run says of its corrections: the first switches, then only what pays."""

from types import SimpleNamespace

import pytest

from dflop_jax.schedule.correction import CorrectionState, StepSample, add_sample, with_decision
from dflop_jax.train.correction import Corrector

STEPS, CHANGE = 700, 300
OVERHEAD_S = 1e-3


class Scripted(Corrector):
    """Is told what it would measure: by step the log ratio of one program, and the gain."""

    def __init__(self, measured):
        self.lines, self.switches = [], 0
        progress = SimpleNamespace(log=self.lines.append)
        ready = SimpleNamespace(prices=None, progress=progress)
        super().__init__(ready, None, CorrectionState(""))
        self.measured = measured

    def _sample(self, trace, batch):
        ratio, _ = self.measured(batch.step)
        figures = self._gain_s, self._overhead_s
        sample = StepSample(batch.step, batch.step + 1, "", {"a": ratio}, *figures)
        self._learnt = add_sample(self._learnt, sample)

    def _decide(self, batch):
        self._gain_s, self._overhead_s = self.measured(batch.step)[1], OVERHEAD_S
        self._learnt = with_decision(self._learnt, self._gain_s, self._overhead_s)

    def run(self):
        was_on = False
        for step in range(STEPS):
            self.after_step(None, SimpleNamespace(step=step))
            on = self.report["sampling"] == 1
            self.switches += on != was_on
            was_on = on
        return self.lines


def test_a_correction_that_brings_nothing_is_said_once():
    corrector = Scripted(lambda step: (1.0 if step % 100 > 50 else 0.4, 0.0))
    first, second = corrector.run()
    assert corrector.switches >= 8
    assert first == "step 2: task times are sampled, by which schedules are corrected"
    assert second.startswith("step 9: schedules follow task times that are up to 1.49x off")
    assert second.endswith("which by prediction saves nothing; sampling took 1.0 ms a step")


@pytest.mark.parametrize("changed", [False, True])
def test_one_that_comes_to_pay_is_said_when_it_does(changed):
    """Nothing more is said while what is saved was said before."""
    corrector = Scripted(lambda step: (1.2 if changed and step >= CHANGE else 0.4, 0.02))
    lines = corrector.run()[2:]
    assert corrector.switches >= 8
    assert len(lines) == changed
    for line in lines:
        step = int(line.partition(":")[0].removeprefix("step "))
        assert step > CHANGE
        assert (
            "up to 3.32x off the predicted ones, which by prediction saves 20.0 ms a step" in line
        )
