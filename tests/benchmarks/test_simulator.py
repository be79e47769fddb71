"""`benchmarks/simulator.py`: what it writes of given rows, what it runs, and bad arguments."""

import pytest

from .scripts import module, refusal


@pytest.fixture(scope="module")
def report():
    return module("simulator_steps")


def rows(set_up, errors, run=0):
    one = {"set_up": set_up, "run": run, "measured_s": 2.0, "layers_s": 1.0, "chosen_by_s": 3.0}
    return [one | {"calibrated_s": 2.0 * (1 + e)} for e in errors]


def test_errors_of_all_and_of_each_set_up(report):
    both = rows("pinned", [0.02, -0.08, 0.04]) + rows("pretended", [-0.25])
    found = report.result(both)
    assert found["median_abs_error"] == pytest.approx(0.06)
    assert found["worst_abs_error"] == pytest.approx(0.25)
    pinned = found["set_ups"]["pinned"]
    assert pinned["median_abs_error"] == pytest.approx(0.04)
    assert pinned["worst_abs_error"] == pytest.approx(0.08)
    for source in ("layers", "chosen_by"):
        assert pinned[source] == {"median_abs_error": 0.5, "worst_abs_error": 0.5}
    assert found["rows"] == both
    assert set(report.result(rows("pretended", [0.0]))["set_ups"]) == {"pretended"}


def test_only_undisturbed_steps_count():
    steps = module("simulator_steps")
    Step, undisturbed = steps.Step, steps.undisturbed
    DISTURBED, SLOWER = steps.DISTURBED, steps.SLOWER
    quiet, loud = Step(1.0, DISTURBED, 2.0, None), Step(1.0, 2 * DISTURBED, 1.0, None)
    slow = Step(1.0, 0.0, 2.01 * SLOWER, None)
    assert undisturbed([loud, quiet, slow, loud]) == [quiet]
    assert undisturbed([quiet, slow, slow]) == [quiet]
    assert undisturbed([slow]) == [slow]
    assert undisturbed([loud]) == undisturbed([]) == []


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("--only", "moon"), "invalid choice: 'moon'"),
        (("--json", "/nowhere/out.json"), "no such folder"),
        (("--runs", "0"), "--runs 0 must be at least 1"),
    ],
)
def test_bad_arguments(arguments, why):
    assert why in refusal("simulator", *arguments)
