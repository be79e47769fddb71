"""The configuration of a run: nested frozen dataclasses, dotted overrides, JSON.

The annotation of a field has its type (or a `Literal` of names), bounds, and its help line. Checks,
conversions and the command line are derived from the annotations.

Long because it has every flag of a run with its help line.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from dflop_jax.config_fields import (
    DECAYS,
    RATES,
    Field,
    adapter_ranks,
    check_bounds,
    fields_of,
    named_columns,
    named_numbers,
    overridden,
    profiled_steps,
)

# Every number with a bound is finite, too.
_ABOVE_0 = Meta(gt=0, description="a finite number above 0")
_FROM_0 = Meta(ge=0, description="a finite number, 0 or above")
PositiveInt = Annotated[int, Meta(ge=1, description="at least 1")]
NonNegativeInt = Annotated[int, _FROM_0]
PositiveFloat = Annotated[float, _ABOVE_0]
NonNegativeFloat = Annotated[float, _FROM_0]
Fraction = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Decay = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]

Dtype = Literal["float32", "bfloat16"]
Policy = Literal["auto", "dflop", "orch", "dip", "blind", "megatron", "pytorch"]
Effort = Literal["quick", "full"]
LrSchedule = Literal["constant", "linear", "cosine", "wsd"]
# Above it, a step without a gradient shrinks a second moment by less than bfloat16 can tell.
BFLOAT16_BETA2 = 0.99


@dataclass(frozen=True)
class ModelConfig:
    factory: Annotated[str, "import path MODULE:FUNCTION that builds the model"] = (
        "models.llava:build"
    )
    size: Annotated[str, "size name from the model's table, or a folder with a config.json"] = (
        "tiny"
    )
    weights: Annotated[
        tuple[str, ...],
        "to begin with: a folder of published weights, or a run (RUN, RUN@STEP); or MODULE=FOLDER",
    ] = ()
    dtype: Annotated[Dtype, "compute dtype: float32 or bfloat16"] = "float32"
    attention_kernel: Annotated[
        Literal["auto", "cudnn", "pallas", "xla"],
        "auto (the fastest with equal bits), cudnn (the fastest), pallas (both GPUs only), xla",
    ] = "auto"


@dataclass(frozen=True)
class DataConfig:
    path: Annotated[
        str,
        "LLaVA-format JSON/JSONL file or folder, .tar shards, Parquet or Arrow files, OWNER/NAME "
        "in the hub's cache, a .yaml mixture; empty: scenes",
    ] = ""
    eval_path: Annotated[
        str,
        "records to evaluate on, in the forms of data.path, of which train.eval_samples are used; "
        "empty: records of data.path that training leaves out",
    ] = ""
    factory: Annotated[
        str, "import path MODULE:FUNCTION of a source of your own: f(config.data, model, split)"
    ] = ""
    root: Annotated[
        tuple[str, ...],
        "folders of the media, searched in turn; no file outside them is opened; empty: the "
        "folder of the JSON file",
    ] = ()
    n_samples: Annotated[PositiveInt, "size of the embedded dataset"] = 4096
    seed: Annotated[int, "seed of the embedded dataset and of the epoch order"] = 0
    changed: Annotated[
        Literal["refuse", "ok"],
        "if a run resumes with other data than its checkpoint's: refuse, or ok (continue)",
    ] = "refuse"
    max_tiles: Annotated[
        PositiveInt, "maximum AnyRes grid tiles of an image, without the base tile"
    ] = 9
    max_frames: Annotated[PositiveInt, "maximum frames sampled from a video"] = 32
    min_pixels: Annotated[
        PositiveInt, "minimum pixels of an image, for models at native resolution"
    ] = 65_536
    max_pixels: Annotated[
        PositiveInt, "maximum pixels of an image, for models at native resolution"
    ] = 16_777_216
    max_clip_pixels: Annotated[
        PositiveInt, "maximum pixels of all frames of a clip, for models at native resolution"
    ] = 25_165_824
    frames_per_s: Annotated[
        PositiveFloat, "frames sampled per second of a clip, for models at native resolution"
    ] = 2.0
    max_tokens: Annotated[
        PositiveInt, "longest sample in LLM tokens; data.oversize decides about longer ones"
    ] = 1024
    oversize: Annotated[
        Literal["drop", "truncate", "error"],
        "sample above max_tokens: drop, truncate (its first max_tokens, media whole or not at all) "
        "or error; one that no compiled shape holds is dropped, or an error",
    ] = "truncate"
    tokenizer: Annotated[
        str, "a tokenizer.json, or a model's folder with its chat template; empty or bytes: bytes"
    ] = ""
    columns: Annotated[
        tuple[str, ...],
        "names of columns that differ from the usual ones: messages=chat,image=pictures",
    ] = ()
    loss_on_prompts: Annotated[
        bool, "train on all text of a record, not on answers alone; held-out losses stay on answers"
    ] = False
    blank_images: Annotated[bool, "replace every picture by grey (a control experiment)"] = False
    max_bad_fraction: Annotated[
        NonNegativeFloat, "share of undecodable samples that stops the run"
    ] = 0.1
    sample_timeout_s: Annotated[
        PositiveFloat, "seconds after which a sample that is not decoded counts as bad"
    ] = 60.0
    sample_memory_bytes: Annotated[
        PositiveFloat, "memory that decoding one sample may take, above which it counts as bad"
    ] = 4e9
    workers: Annotated[PositiveInt, "samples of files decoded at once, in a process each"] = 2
    prefetch: Annotated[PositiveInt, "batches kept ready ahead of training"] = 2


@dataclass(frozen=True)
class PlanConfig:
    policy: Annotated[
        Policy, "dflop, orch, dip, auto (the fastest of them), or a baseline; see the README"
    ] = "auto"
    devices: Annotated[NonNegativeInt, "devices to use; 0: all"] = 0
    hardware: Annotated[
        str, "plan for plan.devices of these, without having them: a100-80, h100, ...; empty: here"
    ] = ""
    node: Annotated[
        NonNegativeInt, "devices that share a node; 0: those of a host, or of its data sheet"
    ] = 0
    buckets: Annotated[PositiveInt, "maximum compiled shapes (buckets) per module"] = 4
    max_model: Annotated[
        NonNegativeInt, "largest tensor-parallel degree tried; 0: by the model's size and the node"
    ] = 0
    max_stage: Annotated[
        NonNegativeInt, "largest pipeline degree tried (of dip: ranks); 0: by the model's size"
    ] = 0
    max_microbatches: Annotated[
        NonNegativeInt, "maximum microbatches of a global batch; 0: by the batch and the memory"
    ] = 0
    microbatches_per_stage: Annotated[
        NonNegativeInt,
        "microbatches of a group for each stage of a module that is a loop of stages: more keep it "
        "fuller and hold more memory; 0: the fastest of 1, 2, 4 and 8",
    ] = 0
    rounds: Annotated[
        NonNegativeInt,
        "passes of a microbatch through the stages of such a loop, each through other layers "
        "(interleaving): more rounds keep it fuller and send more; 0: the faster of 1 and 2",
    ] = 0
    memory_bytes: Annotated[
        NonNegativeFloat,
        "memory of a device that a plan may fill, such as 80GB; 0: 95% of what jax takes",
    ] = 0.0
    zero: Annotated[
        Literal["auto", "1", "2", "3"],
        "what data ranks shard: 1 optimizer state, 2 gradients too, 3 parameters too (ZeRO), or "
        "auto (by module, the cheapest that fits into memory)",
    ] = "auto"
    shard_devices: Annotated[
        NonNegativeInt,
        "neighbouring devices that shard what `zero` names, in blocks that divide a module's data "
        "ranks; 0: all devices, or those of a node where that is faster",
    ] = 0
    effort: Annotated[Effort, "quick, or full: evaluate more placements and bucket sizes"] = "full"
    sampled_batches: Annotated[PositiveInt, "global batches simulated for each candidate"] = 4
    drift: Annotated[
        Fraction,
        "share of drifted batches, of other media than the data's, that plans are judged by",
    ] = 1 / 3
    finalists: Annotated[
        NonNegativeInt,
        "plans whose programs are timed before one is chosen; batches are then scheduled by these "
        "times (1: time the best plan by the profile; 0: choose and schedule by the profile)",
    ] = 3
    profile_samples: Annotated[
        PositiveInt, "samples whose shapes are read for the data profile"
    ] = 2000
    redecide_every: Annotated[
        NonNegativeInt,
        "steps between checks whether recent samples need another plan; the run changes to it if "
        "that saves more time than it costs, and losses then agree to rounding; 0: never",
    ] = 0


@dataclass(frozen=True)
class ScheduleConfig:
    work: Annotated[
        NonNegativeInt, "units of work of one batch's solve; 0: as much as a step hides"
    ] = 0
    ahead: Annotated[PositiveInt, "global batches scheduled ahead"] = 4
    correct: Annotated[
        bool,
        "correct predicted times by measured ones while that shortens steps; decisions are saved, "
        "so that a resumed run decides alike",
    ] = True


@dataclass(frozen=True)
class TrainConfig:
    steps: Annotated[PositiveInt, "optimizer steps"] = 100
    epochs: Annotated[NonNegativeFloat, "epochs, in place of train.steps; 0: train.steps"] = 0.0
    max_hours: Annotated[
        NonNegativeFloat,
        "hours after a process's start at which the run saves and ends, as by a signal; 0: none",
    ] = 0.0
    global_batch: Annotated[
        PositiveInt, "samples per optimizer step, at most as many as the data have"
    ] = 64
    learning_rate: Annotated[PositiveFloat, "peak learning rate"] = 1e-3
    schedule: Annotated[
        LrSchedule,
        "learning rate after the warm-up: constant, linear or cosine decay, or wsd (constant, with "
        "a linear decay over the last steps)",
    ] = "cosine"
    warmup_steps: Annotated[NonNegativeInt, "steps of linear warm-up"] = 10
    warmup_ratio: Annotated[
        Fraction, "fraction of all steps that is warm-up, in place of warmup_steps; 0: off"
    ] = 0.0
    decay_steps: Annotated[
        NonNegativeInt, "last steps, over which the schedule wsd decays; 0: a tenth of all"
    ] = 0
    final_lr_fraction: Annotated[Fraction, "learning rate at the end of a decay over its peak"] = (
        0.1
    )
    optimizer: Annotated[Literal["adamw", "lion"], "adamw or lion"] = "adamw"
    weight_decay: Annotated[NonNegativeFloat, "weight decay of matrices"] = 0.01
    weight_decays: Annotated[
        tuple[str, ...], "weight decay of matrices of single parts, as vision=0,llm=0.1"
    ] = ()
    clip_norm: Annotated[NonNegativeFloat, "global gradient norm is clipped to this; 0: off"] = 1.0
    z_loss: Annotated[
        NonNegativeFloat,
        "weight of the squared log of a token's sum of exponentials (z-loss), added to the loss; "
        "reported losses are without it",
    ] = 0.0
    label_smoothing: Annotated[
        Decay,
        "fraction of a token's target that is spread over the vocabulary; reported losses are "
        "without it",
    ] = 0.0
    loss_spike: Annotated[
        NonNegativeFloat,
        "skip a step, too, whose global gradient norm is more than this many times its running "
        "median (8, say); 0: off",
    ] = 0.0
    max_bad_steps: Annotated[
        PositiveInt,
        "steps in a row without an update (gradients not finite, or a spike of their norm) after "
        "which the run ends; 1: the first",
    ] = 10
    beta1: Annotated[Decay, "decay of the first moment of adamw and lion"] = 0.9
    beta2: Annotated[Decay, "decay of adamw's second moment, and of lion's average"] = 0.95
    eps: Annotated[PositiveFloat, "AdamW divides by the root of the second moment and this"] = 1e-8
    moments_dtype: Annotated[
        Dtype, "dtype of the optimizer's moments between steps: float32 or bfloat16"
    ] = "float32"
    ema: Annotated[
        Decay,
        "decay of an average of the parameters over steps, which evaluations use instead "
        "(such as 0.999); 0: none",
    ] = 0.0
    learning_rates: Annotated[
        tuple[str, ...], "peak rates of single parts, as vision=2e-6,connector=1e-5"
    ] = ()
    stage: Annotated[
        Literal["full", "connector", "llm"],
        "what trains: full, connector (encoders and LLM frozen) or llm (all else frozen)",
    ] = "full"
    freeze: Annotated[tuple[str, ...], "parts to freeze: vision, audio, connector, llm"] = ()
    lora_rank: Annotated[
        NonNegativeInt, "rank of LoRA, which freezes parts without a rate; 0: off"
    ] = 0
    lora_targets: Annotated[
        tuple[str, ...],
        "matrices that LoRA adapts, as llm,vision.up,conn*.out (* stands for any); empty: llm",
    ] = ()
    lora_ranks: Annotated[
        tuple[str, ...], "ranks of some targets, as vision=4,llm.query=32; the last match counts"
    ] = ()
    lora_alpha: Annotated[PositiveFloat, "strength of LoRA: it is scaled by lora_alpha / rank"] = (
        16.0
    )
    lora_dropout: Annotated[Decay, "dropout of an adapter's input in training"] = 0.0
    seed: Annotated[int, "seed of the parameters"] = 0
    remat: Annotated[
        Literal["auto", "none", "dots", "named", "layers", "segment"],
        "what backward recomputes, for less memory: none, dots (all but products), named (all but "
        "attention), layers (each from its input), segment (all of it from its input), or auto (by "
        "module, the cheapest that fits into memory)",
    ] = "auto"
    peak_flops: Annotated[
        NonNegativeFloat, "peak FLOP/s of a device, for the MFU; 0: by its name"
    ] = 0.0
    profile_steps: Annotated[
        str,
        "A:B: jax's profiler traces steps A to B (from 0, both included) to RUN/xprof; empty: off",
    ] = ""
    log_every: Annotated[
        NonNegativeInt,
        "steps between the lines of a log (without a terminal), and between those that TensorBoard "
        "and W&B get; metrics.jsonl has every step; 0: about 20 lines, and every step",
    ] = 0
    tensorboard: Annotated[bool, "also write the metrics to RUN/tensorboard (tensorboardX)"] = False
    wandb_project: Annotated[str, "also send the metrics to this project of W&B; empty: off"] = ""
    wandb_entity: Annotated[str, "user or team of the project; empty: W&B's default"] = ""
    wandb_name: Annotated[str, "name of the run in W&B; empty: the run folder's"] = ""
    wandb_tags: Annotated[tuple[str, ...], "tags of the run in W&B, as first,second"] = ()
    eval_every: Annotated[NonNegativeInt, "steps between evaluations; 0: only at the end"] = 0
    eval_samples: Annotated[
        NonNegativeInt, "held-out samples; 0: all of train.eval_fraction, or no evaluation"
    ] = 0
    eval_fraction: Annotated[
        Decay,
        "fraction of data.path that is held out, each record by its own id and data.seed, of which "
        "train.eval_samples are evaluated; 0: train.eval_samples are held out",
    ] = 0.0

    @property
    def evaluates(self) -> bool:
        """Whether samples are held out and evaluated."""
        return bool(self.eval_samples or self.eval_fraction)


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[
        NonNegativeInt, "steps between checkpoints, beside `every_s`; 0: none by steps"
    ] = 0
    every_s: Annotated[NonNegativeFloat, "seconds between checkpoints; 0: none by time"] = 600.0
    keep: Annotated[PositiveInt, "newest checkpoints that are kept"] = 3
    keep_every: Annotated[
        NonNegativeInt, "the first checkpoint of every so many steps is kept, too; 0: none"
    ] = 0
    keep_best: Annotated[
        bool,
        "also keep the checkpoint of the lowest held-out loss: the best evaluation so far saves",
    ] = False

    @property
    def saves(self) -> bool:
        """Whether a run saves at all."""
        return bool(self.every or self.every_s)


@dataclass(frozen=True)
class DistributedConfig:
    coordinator: Annotated[
        str, "HOST:PORT of process 0; empty: from dflop launch, Slurm, Open MPI or Kubernetes"
    ] = ""
    num_processes: Annotated[NonNegativeInt, "processes of the run; 0: as the launcher says"] = 0
    process_id: Annotated[int, "this process, from 0; -1: as the launcher says"] = -1
    connect_timeout_s: Annotated[PositiveFloat, "longest wait for all processes at the start"] = (
        120.0
    )
    peer_timeout_s: Annotated[PositiveFloat, "silence after which a process counts as lost"] = 15.0
    hang_factor: Annotated[
        NonNegativeFloat,
        "factor over the longest measured duration after which a step, a save, an evaluation or "
        "another section counts as hung and the run ends (exit code 4); 0: off",
    ] = 20.0
    hang_min_s: Annotated[
        PositiveFloat, "shortest such deadline; a section without a measurement has 30 times this"
    ] = 120.0


@dataclass(frozen=True)
class Config:
    """Everything a run depends on; an experiment file's `config()` returns one."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run_dir: Annotated[
        str, "folder the run writes to; {time} in it becomes the time at which the run began"
    ] = "runs/run"
    cache_dir: Annotated[str, "folder of cached profiles and compiled programs"] = "runs/cache"

    def __post_init__(self) -> None:
        for leaf in fields():
            leaf.check(leaf.value(self))
        for name, rate in named_numbers(self.train.learning_rates, RATES).items():
            check_bounds(f"train.learning_rates {name}", rate, _ABOVE_0)
        for name, decay in named_numbers(self.train.weight_decays, DECAYS).items():
            check_bounds(f"train.weight_decays {name}", decay, _FROM_0)
        adapter_ranks(self.train.lora_ranks)
        profiled_steps(self.train.profile_steps)
        if self.train.moments_dtype == "bfloat16" and self.train.beta2 > BFLOAT16_BETA2:
            raise ValueError(
                f"train.moments_dtype=bfloat16 cannot follow train.beta2={self.train.beta2}, whose "
                "second moments would stand still; set train.beta2 to "
                f"{BFLOAT16_BETA2} at most, or the dtype to float32"
            )
        named_columns(self.data.columns)


def fields() -> tuple[Field, ...]:
    """Every field that holds a value, of a configuration and of its sections."""
    return fields_of(Config)


# A field -> the field that says the same in another way: given, it puts that one out of force.
ALTERNATIVES = {"train.steps": "train.epochs", "train.warmup_steps": "train.warmup_ratio"}


# A field -> the field beside which alone it has an effect, and the values of that which give it one
# (none: any but 0, false and empty).
EFFECTIVE_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        [f"train.lora_{name}" for name in ("alpha", "dropout", "ranks", "targets")],
        ("train.lora_rank", ()),
    ),
    "train.decay_steps": ("train.schedule", ("wsd",)),
    "train.final_lr_fraction": ("train.schedule", ("linear", "cosine", "wsd")),
    "train.eps": ("train.optimizer", ("adamw",)),
    **dict.fromkeys(
        [f"train.wandb_{name}" for name in ("entity", "name", "tags")], ("train.wandb_project", ())
    ),
    "data.n_samples": ("data.path", ("",)),
}


def check_effective(config: Config, requested: Container[str]) -> None:
    """Raise ValueError where a requested field, by its dotted name, has no effect in `config`, or
    the warm-up is longer than the run."""
    values = {leaf.name: leaf.value(config) for leaf in fields()}
    for name, (other_name, allowed) in EFFECTIVE_WITH.items():
        if name not in requested or not values[name]:
            continue
        if values[other_name] not in allowed if allowed else not values[other_name]:
            needed = f"{other_name} {' or '.join(allowed) or 'empty'}" if allowed else other_name
            raise ValueError(
                f"{name}={values[name]} has an effect only with {needed}; set that, or leave "
                f"{name} out"
            )
    train = config.train
    if "train.warmup_steps" in requested and not (train.epochs or train.warmup_ratio):
        check_warmup(train)


def check_warmup(train: TrainConfig) -> None:
    """Raise ValueError for a warm-up of more steps than the run has."""
    if train.warmup_steps > train.steps:
        raise ValueError(
            f"train.warmup_steps={train.warmup_steps} is longer than the run of {train.steps} "
            f"steps; set train.warmup_steps to {train.steps - 1} at most, or give more steps"
        )


def override(config: Config, values: Mapping[str, str | Sequence[str]]) -> Config:
    """`config` with dotted fields replaced; see `config_fields.overridden` and `check_effective`,
    which is about the fields that are replaced."""
    changed = overridden(config, values, ALTERNATIVES)
    check_effective(changed, values)
    return changed
