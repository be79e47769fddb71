"""The loss of a batch of several modules, against adding up token by token."""

from types import SimpleNamespace

import pytest

from dflop_jax.train.feed import BatchLoss, modules_with_loss


def module(*fields, **more):
    return SimpleNamespace(inputs={"entry": ("tokens",), "exit": fields}, **more)


MODEL = SimpleNamespace(
    modules={
        "eye": module("grid"),
        "text": module("targets", "weights"),
        "generator": module("weights", loss_weight=0.25),
    }
)


def test_a_module_that_reads_weights_has_a_loss():
    assert modules_with_loss(MODEL) == ("text", "generator")
    assert modules_with_loss(SimpleNamespace(modules={"eye": module()})) == ()


def test_every_module_has_a_denominator_of_its_own():
    loss = BatchLoss.for_model(MODEL, {"text": 30.0, "generator": 2.5})
    sums = {"text.loss_sum": 60.0, "text.correct": 15.0, "generator.loss_sum": 20.0}
    assert loss.means(sums) == {"text": 2.0, "generator": 8.0}
    assert loss.total(sums) == 2.0 + 0.25 * 8.0
    assert loss.scales == {"text": 1 / 30, "generator": 0.25 / 2.5}
    # What the scales make of the tokens' losses is the loss.
    total = sum(scale * sums[f"{m}.loss_sum"] for m, scale in loss.scales.items())
    assert total == pytest.approx(loss.total(sums))
    assert loss.means(sums, "correct") == {"text": 0.5, "generator": 0.0}
    assert loss.is_supervised


def test_a_batch_without_a_supervised_token_divides_by_one():
    loss = BatchLoss.for_model(MODEL, {"text": 0.0, "generator": 0.0})
    assert loss.scales == {"text": 1.0, "generator": 0.25}
    assert loss.total({}) == 0.0
    assert not loss.is_supervised
    assert BatchLoss.for_model(MODEL, {"text": 0.0, "generator": 0.1}).is_supervised


@pytest.mark.parametrize("weight", [1.0, 0.1, 0.001])
def test_small_weights_do_not_scale_the_loss(weight):
    loss = BatchLoss.for_model(MODEL, {"text": 9 * weight})
    assert loss.means({"text.loss_sum": 9 * weight * 7}) == {"text": pytest.approx(7)}
    assert loss.scales["text"] * 9 * weight == pytest.approx(1)
