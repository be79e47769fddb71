"""Overrides of every field, and one line for each kind of mistake."""

import dataclasses

import msgspec
import pytest

from dflop_jax.config import EFFECTIVE_WITH, Config, DataConfig, TrainConfig, fields, override


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


def test_fields_are_the_leaves_of_the_configuration():
    flat = msgspec.to_builtins(Config())
    leaves = {
        f"{k}.{j}" if isinstance(v, dict) else k
        for k, v in flat.items()
        for j in (v if isinstance(v, dict) else [None])
    }
    assert {leaf.name for leaf in fields()} == leaves


def test_several_overrides_at_once_keep_the_experiment():
    base = Config(train=TrainConfig(steps=7), run_dir="mine")
    got = override(base, {"train.seed": "3", "data.n_samples": "9"})
    assert (got.train.steps, got.train.seed, got.data.n_samples, got.run_dir) == (7, 3, 9, "mine")
    assert override(base, {}) == base


@pytest.mark.parametrize("text, value", [("", ()), ("llm", ("llm",)), (["vision"], ("vision",))])
def test_lists(text, value):
    assert override(Config(), {"train.freeze": text}).train.freeze == value


@pytest.mark.parametrize("text, value", [("1e-4", 1e-4), ("2", 2.0), ("0", 0.0)])
def test_numbers(text, value):
    assert override(Config(), {"train.weight_decay": text}).train.weight_decay == value


@pytest.mark.parametrize("text, value", [("false", False), ("1", True), ("0", False)])
def test_booleans(text, value):
    base = Config(data=DataConfig(blank_images=not value))
    assert override(base, {"data.blank_images": text}).data.blank_images is value


def test_what_says_the_same_in_another_way_is_out_of_force():
    shown = override(Config(), {"train.epochs": "2", "train.warmup_ratio": "0.1"})
    assert (shown.train.epochs, shown.train.steps) == (2.0, Config().train.steps)
    counted = override(shown, {"train.steps": "9", "train.warmup_steps": "1"}).train
    assert (counted.epochs, counted.steps) == (0.0, 9)
    assert (counted.warmup_ratio, counted.warmup_steps) == (0.0, 1)


def test_checkpoints_come_by_time_or_by_steps():
    assert (Config().checkpoint.every, Config().checkpoint.every_s) == (0, 600.0)
    saving = [{}, {"every": "0"}, {"every_s": "0"}, {"every_s": "0", "every": "60"}]
    flags = [{f"checkpoint.{name}": text for name, text in one.items()} for one in saving]
    assert [override(Config(), one).checkpoint.saves for one in flags] == [True, True, False, True]


# Rule -> (a value that is allowed, values that are not, fields).
RULES = {
    "must be at least 1": (
        "1",
        ("0", "-3"),
        """
        train.steps train.max_bad_steps train.global_batch plan.buckets plan.sampled_batches
        plan.profile_samples data.n_samples data.max_tokens data.max_frames data.max_tiles
        data.min_pixels data.max_pixels data.max_clip_pixels data.workers data.prefetch
        schedule.ahead checkpoint.keep
    """,
    ),
    "must be a finite number above 0": (
        "1",
        ("0", "-1", "inf", "nan"),
        """
        data.frames_per_s data.sample_timeout_s data.sample_memory_bytes train.learning_rate
        train.eps train.lora_alpha distributed.connect_timeout_s distributed.peer_timeout_s
        distributed.hang_min_s
    """,
    ),
    "must be a finite number, 0 or above": (
        "0",
        ("-1",),
        """
        train.max_hours train.log_every distributed.hang_factor train.epochs train.warmup_steps
        train.decay_steps train.z_loss train.weight_decay train.clip_norm train.loss_spike
        train.lora_rank train.eval_every train.eval_samples train.peak_flops plan.devices
        plan.node plan.max_model plan.max_stage plan.max_microbatches plan.microbatches_per_stage
        plan.rounds plan.finalists plan.redecide_every plan.memory_bytes plan.shard_devices
        data.max_bad_fraction checkpoint.every checkpoint.every_s checkpoint.keep_every
        distributed.num_processes schedule.work
    """,
    ),
    "must be a number from 0 to 1": (
        "1",
        ("-0.1", "1.5", "nan", "inf"),
        """
        plan.drift train.warmup_ratio train.final_lr_fraction
    """,
    ),
    "must be a number from 0 to below 1": (
        "0.5",
        ("-0.1", "1.0", "nan", "inf"),
        """
        train.lora_dropout train.beta1 train.beta2 train.eval_fraction train.ema
        train.label_smoothing
    """,
    ),
}


@pytest.mark.parametrize("rule, name", [(r, n) for r, (*_, f) in RULES.items() for n in f.split()])
def test_numbers_stay_in_their_bounds(rule, name):
    good, wrong, _ = RULES[rule]
    assert get(override(usable(name), {name: good}), name) == float(good)
    for value in wrong:
        with pytest.raises(ValueError, match=rf"{name}={value}.* {rule}"):
            override(Config(), {name: value})


def test_the_rules_name_every_bound():
    bounded = {leaf.name for leaf in fields() if leaf.bounds}
    assert bounded == {name for *_, names in RULES.values() for name in names.split()}


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run_dir = "elsewhere"


def test_values_that_are_only_allowed_together_come_together():
    slow = Config(train=TrainConfig(beta2=0.999))
    both = {"train.moments_dtype": "bfloat16", "train.beta2": "0.95"}
    assert override(slow, both).train.beta2 == 0.95
    assert override(slow, dict(reversed(both.items()))).train.moments_dtype == "bfloat16"


def test_json_round_trip():
    config = Config(train=TrainConfig(freeze=("vision",)), run_dir="x")
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


# ---- texts that stand for values: sizes with units, short names ----


@pytest.mark.parametrize(
    "text, n_bytes",
    [("80GB", 80e9), ("80GiB", 80 * 2**30), (" 80 GB ", 80e9), ("1.5tib", 1.5 * 2**40),
     ("80g", 80e9), ("512 MiB", 2**29), ("7B", 7.0), ("4e9", 4e9), ("4e9 kB", 4e12), ("0", 0.0)],
)  # fmt: skip
def test_sizes(text, n_bytes):
    for name in ("plan.memory_bytes", "data.sample_memory_bytes"):
        if n_bytes:
            assert get(override(Config(), {name: text}), name) == n_bytes
    assert override(Config(), {"plan.memory_bytes": text}).plan.memory_bytes == n_bytes


@pytest.mark.parametrize("name", ["model.dtype", "train.moments_dtype"])
@pytest.mark.parametrize("text, dtype", [("bf16", "bfloat16"), ("BF16", "bfloat16"),
                                         ("fp32", "float32")])  # fmt: skip
def test_short_names_of_dtypes(name, text, dtype):
    assert get(override(Config(), {name: text}), name) == dtype
