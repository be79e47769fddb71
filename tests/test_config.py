"""Overrides of every field, and one line for each kind of mistake."""

import pytest

from dflop_jax.config import EFFECTIVE_WITH, Config, TrainConfig, fields, override


def get(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def usable(name):
    """A configuration in which a field has an effect."""
    other, values = EFFECTIVE_WITH.get(name, ("", ()))
    return override(Config(), {other: (values or ("1",))[0]}) if other else Config()


def other_value(leaf):
    """(text, value) of a legal value that is not the default."""
    name, kind = leaf.name, leaf.kind
    if leaf.choices:
        other = next(c for c in leaf.choices if c != get(Config(), name))
        return other, other
    if name in ("train.learning_rates", "train.weight_decays"):
        return "vision=2e-6,connector=1e-5", ("vision=2e-6", "connector=1e-5")
    if name == "train.lora_ranks":
        return "vision=4,llm.query=32", ("vision=4", "llm.query=32")
    if name == "data.columns":
        return "messages=chat,image=pictures", ("messages=chat", "image=pictures")
    if name == "train.profile_steps":
        return "3:5", "3:5"
    if kind is bool:
        other = not get(Config(), name)
        return str(other).lower(), other
    if kind is int:
        return "17", 17
    if kind is float:
        return "0.125", 0.125
    if kind is str:
        return "some text", "some text"
    return "vision,llm", ("vision", "llm")


@pytest.mark.parametrize("leaf", fields(), ids=lambda leaf: leaf.name)
def test_every_field_takes_an_override_and_has_help(leaf):
    name, kind = leaf.name, leaf.kind
    assert len(leaf.help) > 10
    said, value = other_value(leaf)
    assert get(Config(), name) != value
    changed = override(usable(name), {name: said})
    assert get(changed, name) == value
    assert type(get(changed, name)) is type(value)
    # Nothing else changed.
    default = str(get(Config(), name)) if kind is not tuple else ""
    back = override(changed, {name: [*get(Config(), name)] if "tuple" in str(kind) else default})
    assert back == usable(name)


@pytest.mark.parametrize(
    "leaf", [f for f in fields() if f.name in EFFECTIVE_WITH], ids=lambda f: f.name
)
def test_a_field_without_effect_is_refused_beside_what_gives_it_one(leaf):
    other, values = EFFECTIVE_WITH[leaf.name]
    without = {f.name: f.choices for f in fields()}[other]
    value = next((c for c in without if c not in values), "some" if "" in values else "0")
    value = "" if other == "train.wandb_project" else value
    said, _ = other_value(leaf)
    with pytest.raises(ValueError, match=f"an effect only with {other}") as failed:
        override(Config(), {other: value, leaf.name: said})
    assert f"set that, or leave {leaf.name} out" in str(failed.value)
    override(override(usable(leaf.name), {leaf.name: said}), {other: value})  # a file's may stay


def test_a_warm_up_that_is_requested_ends_within_the_run():
    asked = {"train.steps": "5"}
    assert override(Config(), asked).train.steps == 5  # the default is shortened
    assert override(Config(), {**asked, "train.warmup_steps": "5"}).train.warmup_steps == 5
    epochs = {"train.epochs": "1", "train.warmup_steps": "10"}
    assert override(Config(), epochs).train.warmup_steps == 10  # how many steps is not known yet


def test_several_overrides_at_once_keep_the_experiment():
    base = Config(train=TrainConfig(steps=7), run_dir="mine")
    got = override(base, {"train.seed": "3", "data.n_samples": "9"})
    assert (got.train.steps, got.train.seed, got.data.n_samples, got.run_dir) == (7, 3, 9, "mine")
    assert override(base, {}) == base


VALUES = [("train.freeze", "", ()), ("train.freeze", ["vision"], ("vision",)),
          ("train.weight_decay", "1e-4", 1e-4), ("train.weight_decay", "2", 2.0),
          ("data.blank_images", "1", True), ("schedule.correct", "0", False),
          ("model.dtype", "bf16", "bfloat16"), ("train.moments_dtype", "BF16", "bfloat16"),
          *(("plan.memory_bytes", text, n_bytes) for text, n_bytes in (
              ("80GB", 80e9), ("80GiB", 80 * 2.0**30), (" 80 GB ", 80e9), ("0", 0.0), ("7B", 7.0),
              ("1.5tib", 1.5 * 2**40), ("80g", 80e9), ("4e9", 4e9), ("4e9 kB", 4e12)))]  # fmt: skip


@pytest.mark.parametrize("name, text, value", VALUES)
def test_texts_are_converted(name, text, value):
    found = get(override(Config(), {name: text}), name)
    assert (found, type(found)) == (value, type(value))


def test_what_says_the_same_in_another_way_is_out_of_force():
    shown = override(Config(), {"train.epochs": "2", "train.warmup_ratio": "0.1"})
    assert (shown.train.epochs, shown.train.steps) == (2.0, Config().train.steps)
    counted = override(shown, {"train.steps": "9", "train.warmup_steps": "1"}).train
    assert (counted.epochs, counted.steps) == (0.0, 9)
    assert (counted.warmup_ratio, counted.warmup_steps) == (0.0, 1)


# What a bound says -> values that it allows, and values that it does not.
BOUNDS = {
    "at least 1": (["1"], ["0", "-3"]),
    "a finite number above 0": (["0.5"], ["0", "-1", "inf", "nan"]),
    "a finite number, 0 or above": (["0", "7"], ["-1"]),
    "at least -1": (["-1", "0", "8"], ["-2"]),
    "a number from 0 to 1": (["0", "1"], ["-0.1", "1.5", "nan", "inf"]),
    "a number from 0 to below 1": (["0", "0.5"], ["-0.1", "1.0", "nan", "inf"]),
}


@pytest.mark.parametrize("leaf", [f for f in fields() if f.bounds], ids=lambda leaf: leaf.name)
def test_numbers_stay_in_their_bounds(leaf):
    good, wrong = BOUNDS[leaf.bounds.description]
    good = ["1"] if leaf.kind is int and good == ["0.5"] else good
    for value in good:
        assert get(override(usable(leaf.name), {leaf.name: value}), leaf.name) == float(value)
    for value in wrong:
        says = rf"{leaf.name}={value}.* must be {leaf.bounds.description}"
        with pytest.raises(ValueError, match=says):
            override(Config(), {leaf.name: value})


def test_what_would_divide_by_zero_or_never_end_is_bounded():
    unbounded = {f.name for f in fields() if f.kind in (int, float) and not f.bounds}
    assert unbounded == {"data.seed", "train.seed", "distributed.process_id"}


def test_values_that_are_only_allowed_together_come_together():
    slow = Config(train=TrainConfig(beta2=0.999))
    both = {"train.moments_dtype": "bfloat16", "train.beta2": "0.95"}
    assert override(slow, both).train.beta2 == 0.95
    assert override(slow, dict(reversed(both.items()))).train.moments_dtype == "bfloat16"
