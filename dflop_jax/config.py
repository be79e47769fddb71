"""The configuration of a run: nested frozen dataclasses, set by dotted overrides.

A field's annotation has its type (or a `Literal` of names) and bounds. Checks, conversions and
command-line flags are derived from the fields.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from dflop_jax.config_fields import (
    DECAYS,
    RATES,
    Field,
    apply_overrides,
    check_bounds,
    fields_of,
    parse_adapter_ranks,
    parse_columns,
    parse_numbers,
    parse_profile_steps,
)

# Numbers with bounds must also be finite.
_ABOVE_0 = Meta(gt=0, description="a finite number above 0")
_FROM_0 = Meta(ge=0, description="a finite number, 0 or above")
PosInt = Annotated[int, Meta(ge=1, description="at least 1")]
UInt = Annotated[int, _FROM_0]
UIntOrAuto = Annotated[int, Meta(ge=-1, description="at least -1")]
PosFloat = Annotated[float, _ABOVE_0]
UFloat = Annotated[float, _FROM_0]
Fraction = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Decay = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]

Names = tuple[str, ...]
Dtype = Literal["float32", "bfloat16"]
Policy = Literal["auto", "dflop", "orch", "dip", "blind", "megatron", "pytorch"]
Effort = Literal["auto", "quick", "full"]
LrSchedule = Literal["constant", "linear", "cosine", "wsd"]


def option(default: Any, description: str) -> Any:
    """Return a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": description})


# With a larger beta2 a step decays the second moment by less than the precision of bfloat16.
BFLOAT16_BETA2 = 0.99


@dataclass(frozen=True)
class ModelConfig:
    factory: str = option("models.llava:build", "import path MODULE:FUNCTION that builds the model")
    size: str = option("tiny", "size name from the model's table, or a folder with a config.json")
    weights: Names = option(
        (),
        "initial weights: a folder of published ones, or a run (RUN, RUN@STEP); or MODULE=FOLDER",
    )
    dtype: Dtype = option("float32", "compute dtype: float32 or bfloat16")
    attention_kernel: Literal["auto", "cudnn", "pallas", "xla"] = option(
        "auto",
        "auto (equal bits in every run), cudnn (also backward of tiles, bits may differ), pallas "
        "(the project's; both GPU only), xla",
    )
    matmul: Literal["dtype", "fp8"] = option(
        "dtype",
        "products of layers: in model.dtype, or in fp8 (GPUs from Hopper on; emulated on CPUs)",
    )


@dataclass(frozen=True)
class DataConfig:
    path: str = option(
        "",
        "a LLaVA-format JSON or JSONL file or folder, .tar shards, Parquet or Arrow files, a hub "
        "dataset OWNER/NAME, or a .yaml mixture; empty: the built-in dataset",
    )
    eval_path: str = option(
        "", "evaluation data, in a format of data.path; empty: held-out samples of data.path"
    )
    factory: str = option(
        "", "import path MODULE:FUNCTION of your own data source: f(config.data, model, split)"
    )
    root: Names = option(
        (), "folders searched for media files, in order; no others are read; empty: the data file's"
    )
    n_samples: PosInt = option(4096, "size of the built-in dataset")
    seed: int = option(0, "seed of the built-in dataset and of the epoch order")
    changed: Literal["refuse", "ok"] = option(
        "refuse", "if a run resumes with data other than its checkpoint's: refuse, or ok (continue)"
    )
    max_tiles: PosInt = option(9, "maximum AnyRes grid tiles of an image, without the base tile")
    max_frames: PosInt = option(32, "maximum frames sampled from a video")
    min_pixels: PosInt = option(65_536, "minimum pixels of an image at native resolution")
    max_pixels: PosInt = option(16_777_216, "maximum pixels of an image at native resolution")
    max_clip_pixels: PosInt = option(
        25_165_824, "maximum pixels of a whole clip at native resolution"
    )
    frames_per_s: PosFloat = option(2.0, "frames sampled per second of a clip at native resolution")
    max_tokens: PosInt = option(1024, "maximum LLM tokens of a sample; see data.oversize")
    oversize: Literal["drop", "truncate", "error"] = option(
        "truncate",
        "for a sample above max_tokens: drop, truncate (keep the first max_tokens, without media "
        "that would be cut) or error; a sample that fits no bucket is dropped, or an error",
    )
    tokenizer: str = option("", "a tokenizer.json or a model's folder; empty or bytes: bytes")
    columns: Names = option((), "your names of standard columns: messages=chat,image=pictures")
    loss_on_prompts: bool = option(
        False, "train on all text of a record, not only on answers; evaluations use answers only"
    )
    blank_images: bool = option(False, "replace every image by a grey one (control experiment)")
    max_bad_fraction: UFloat = option(0.1, "fraction of undecodable samples that ends the run")
    sample_timeout_s: PosFloat = option(60.0, "longest decoding time; slower samples are bad")
    sample_memory_bytes: PosFloat = option(4e9, "maximum decoding memory; a larger sample is bad")
    workers: PosInt = option(2, "processes that decode samples of files")
    prefetch: PosInt = option(2, "batches prepared ahead of training")


@dataclass(frozen=True)
class PlanConfig:
    policy: Policy = option(
        "auto", "dflop, orch, dip, auto (the fastest of these), or a baseline; see README"
    )
    devices: UInt = option(0, "devices to use; 0: all")
    hardware: str = option("", "device kind to plan for: a100-80, h100, ...; empty: this host's")
    node: UInt = option(0, "devices per node; 0: as on this host, or in plan.hardware's data sheet")
    buckets: PosInt = option(4, "maximum compiled shapes (buckets) per module")
    max_model: UInt = option(0, "largest tensor-parallel degree tried; 0: by model size and node")
    max_stage: UInt = option(0, "largest pipeline degree tried (dip: ranks); 0: by model size")
    max_microbatches: UInt = option(0, "maximum microbatches of a batch; 0: by batch and memory")
    microbatches_per_stage: UInt = option(
        0,
        "microbatches of a group per pipeline stage: more shorten the bubble and take more "
        "memory; 0: the fastest of 1, 2, 4 and 8",
    )
    rounds: UInt = option(
        0,
        "layer chunks per pipeline stage (interleaving): more shorten the bubble and send more; "
        "0: the faster of 1 and 2",
    )
    submeshes: Literal["any", "separate", "shared"] = option(
        "any",
        "any, separate (the last module, the LLM or generator, shares no device with the others), "
        "or shared (all modules on all devices)",
    )
    loop: Literal["any", "require", "never"] = option(
        "any", "any, require (layers of a module as stages of one shard_map loop), or never"
    )
    memory_bytes: UFloat = option(0.0, "device memory that plans may use, as 80GB; 0: 95% of jax's")
    zero: Literal["auto", "1", "2", "3"] = option(
        "auto",
        "ZeRO stage: data ranks shard 1 optimizer state, 2 also gradients, 3 also parameters; "
        "auto: per module, the fastest that fits into memory",
    )
    shard_devices: UInt = option(
        0,
        "neighbouring devices that shard the state of plan.zero together; 0: all devices, or "
        "those of a node if that is faster",
    )
    effort: Effort = option(
        "auto",
        "of profile and search: quick (the least), full, or auto: 3% of the run or a minute",
    )
    sampled_batches: PosInt = option(4, "global batches simulated per candidate")
    drift: Fraction = option(1 / 3, "fraction of simulated batches with another mix of media")
    trials: UIntOrAuto = option(
        -1,
        "steps trained under the best plan of each policy of auto, to choose one; 0: choose by "
        "predicted seconds; -1: 8 in a run of at least 200 steps whose start may take that long",
    )
    profile_samples: PosInt = option(2000, "samples whose shapes are read for the data profile")
    redecide_every: UInt = option(
        0,
        "steps between checks whether another plan suits recent samples; the run changes to it if "
        "that saves more time than it costs; 0: never",
    )


@dataclass(frozen=True)
class ScheduleConfig:
    work: UInt = option(0, "work limit for scheduling a batch (row pairs priced); 0: by step time")
    ahead: PosInt = option(4, "global batches scheduled ahead")
    correct: bool = option(
        True,
        "correct predicted times by measured ones while that shortens steps, also in resumed runs",
    )


@dataclass(frozen=True)
class TrainConfig:
    steps: PosInt = option(100, "optimizer steps")
    epochs: UFloat = option(0.0, "epochs to train, instead of train.steps; 0: use train.steps")
    max_hours: UFloat = option(0.0, "hours after which the run saves and ends; 0: no limit")
    global_batch: PosInt = option(64, "samples per optimizer step, at most all of the data")
    learning_rate: PosFloat = option(1e-3, "peak learning rate")
    schedule: LrSchedule = option(
        "cosine",
        "learning rate after warm-up: constant, linear, cosine, or wsd (constant, then linear)",
    )
    warmup_steps: UInt = option(10, "steps of linear warm-up")
    warmup_ratio: Fraction = option(0.0, "warm-up as fraction of all steps; 0: use warmup_steps")
    decay_steps: UInt = option(0, "last steps, in which schedule wsd decays; 0: a tenth of all")
    final_lr_fraction: Fraction = option(0.1, "final learning rate as a fraction of the peak")
    optimizer: Literal["adamw", "lion"] = option("adamw", "adamw or lion")
    weight_decay: UFloat = option(0.01, "weight decay of matrices")
    weight_decays: Names = option((), "weight decay per part, as vision=0,llm=0.1")
    clip_norm: UFloat = option(1.0, "global gradient norm is clipped to this; 0: off")
    z_loss: UFloat = option(
        0.0,
        "weight of the z-loss (squared log-sum-exp of the logits), which reported losses leave out",
    )
    label_smoothing: Decay = option(
        0.0, "fraction of a target that is spread over the vocabulary; not in reported losses"
    )
    loss_spike: UFloat = option(
        0.0, "skip a step with a gradient norm above this multiple of its median (say 8); 0: off"
    )
    max_bad_steps: PosInt = option(
        10, "consecutive skipped steps (non-finite gradients or spikes) after which the run ends"
    )
    beta1: Decay = option(0.9, "decay of the first moment (of AdamW or Lion)")
    beta2: Decay = option(0.95, "decay of AdamW's second moment, or of Lion's average")
    eps: PosFloat = option(1e-8, "epsilon of AdamW, added to the root of the second moment")
    moments_dtype: Dtype = option("float32", "dtype of optimizer moments: float32 or bfloat16")
    ema: Decay = option(
        0.0, "decay of a moving average of the parameters, for evaluations (such as 0.999); 0: off"
    )
    learning_rates: Names = option((), "peak learning rate per part, as vision=2e-6,connector=1e-5")
    stage: Literal["full", "connector", "llm"] = option(
        "full", "what trains: full, connector (encoders and LLM frozen) or llm (all else frozen)"
    )
    freeze: Names = option((), "parts to freeze: vision, audio, connector, llm")
    lora_rank: UInt = option(0, "rank of LoRA; parts without a learning rate are frozen; 0: off")
    lora_targets: Names = option(
        (), "matrices that LoRA adapts, as llm,vision.up,conn*.out (* matches any text); empty: llm"
    )
    lora_ranks: Names = option(
        (), "ranks of single targets, as vision=4,llm.query=32; the last match counts"
    )
    lora_alpha: PosFloat = option(16.0, "LoRA's output is scaled by lora_alpha / rank")
    lora_dropout: Decay = option(0.0, "dropout rate of the adapters' inputs in training")
    seed: int = option(0, "seed of the initial parameters")
    remat: Literal["auto", "none", "dots", "named", "layers", "segment"] = option(
        "auto",
        "activations that backward recomputes: none, dots (all but matrix products), named (all "
        "but attention), layers (from each layer's input), segment (from the segment's input), or "
        "auto (per module, the fastest that fits into memory)",
    )
    peak_flops: UFloat = option(0.0, "peak FLOP/s of a device, for the MFU; 0: by its name")
    profile_steps: str = option(
        "", "A:B: trace steps A to B (from 0, inclusive) with jax.profiler to RUN/xprof; empty: off"
    )
    log_every: UInt = option(
        0,
        "steps between log lines, and between points in TensorBoard and W&B; 0: about 20 lines, "
        "and a point every step",
    )
    tensorboard: bool = option(False, "also write the metrics to RUN/tensorboard (tensorboardX)")
    wandb_project: str = option("", "also send the metrics to this W&B project; empty: off")
    wandb_entity: str = option("", "user or team of the W&B project; empty: W&B's default")
    wandb_name: str = option("", "name of the run in W&B; empty: the run folder's")
    wandb_tags: Names = option((), "tags of the run in W&B, as first,second")
    eval_every: UInt = option(0, "steps between evaluations; 0: only at the end")
    eval_samples: UInt = option(0, "held-out samples evaluated; 0: all of train.eval_fraction")
    eval_fraction: Decay = option(
        0.0,
        "fraction of data.path that is held out; train.eval_samples of it are evaluated; 0: hold "
        "out only those",
    )

    @property
    def evaluates(self) -> bool:
        """Whether samples are held out and evaluated."""
        return bool(self.eval_samples or self.eval_fraction)


@dataclass(frozen=True)
class CheckpointConfig:
    every: UInt = option(0, "steps between checkpoints, in addition to every_s; 0: off")
    every_s: UFloat = option(600.0, "seconds between checkpoints; 0: off")
    keep: PosInt = option(3, "number of newest checkpoints that are kept")
    keep_every: UInt = option(0, "also keep the first checkpoint of every N steps; 0: none")
    keep_best: bool = option(
        False, "also keep the checkpoint with the lowest held-out loss; saves at each new one"
    )

    @property
    def saves(self) -> bool:
        """Whether a run saves at all."""
        return bool(self.every or self.every_s)


@dataclass(frozen=True)
class DistributedConfig:
    coordinator: str = option("", "HOST:PORT of process 0; empty: from the launcher or cluster")
    num_processes: UInt = option(0, "processes of the run; 0: from the launcher or cluster")
    process_id: int = option(-1, "this process, from 0; -1: from the launcher or cluster")
    connect_timeout_s: PosFloat = option(120.0, "longest wait at the start for all processes")
    peer_timeout_s: PosFloat = option(15.0, "heartbeat timeout of a process; below 3 counts as 3")
    hang_factor: UFloat = option(
        20.0,
        "a step, save or evaluation counts as hung, and the run ends (exit code 4), after this "
        "many times its longest measured duration; 0: off",
    )
    hang_min_s: PosFloat = option(
        120.0, "minimum of that deadline; unmeasured sections have 30 times this"
    )


@dataclass(frozen=True)
class Config:
    """The configuration of a run; an experiment file's `config()` returns one."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run_dir: str = option(
        "runs/run", "folder of the run; {time} in it is replaced by the time of the start"
    )
    cache_dir: str = option("runs/cache", "folder of cached profiles and compiled programs")

    def __post_init__(self) -> None:
        for leaf in fields():
            leaf.check(leaf.value(self))
        for name, rate in parse_numbers(self.train.learning_rates, RATES).items():
            check_bounds(f"train.learning_rates {name}", rate, _ABOVE_0)
        for name, decay in parse_numbers(self.train.weight_decays, DECAYS).items():
            check_bounds(f"train.weight_decays {name}", decay, _FROM_0)
        parse_adapter_ranks(self.train.lora_ranks)
        parse_profile_steps(self.train.profile_steps)
        if self.train.moments_dtype == "bfloat16" and self.train.beta2 > BFLOAT16_BETA2:
            raise ValueError(
                f"train.moments_dtype=bfloat16 is too coarse for train.beta2={self.train.beta2}: "
                "second moments would not decay; set train.beta2 to "
                f"{BFLOAT16_BETA2} at most, or the dtype to float32"
            )
        parse_columns(self.data.columns)


def fields() -> tuple[Field, ...]:
    return fields_of(Config)


# A field -> the alternative field for the same setting, which is ignored if the field is given.
ALTERNATIVES = {"train.steps": "train.epochs", "train.warmup_steps": "train.warmup_ratio"}
# A field that has an effect only with certain values of another field -> that field and its values
# ((): every value except 0, false and empty).
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
    """Raise ValueError if a requested field has no effect, or the warm-up exceeds the run."""
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
    if train.warmup_steps > train.steps:
        raise ValueError(
            f"train.warmup_steps={train.warmup_steps} is longer than the run of {train.steps} "
            f"steps; set train.warmup_steps to {train.steps - 1} at most, or give more steps"
        )


def override(config: Config, values: Mapping[str, str | Sequence[str]]) -> Config:
    """Return `config` with dotted fields replaced; ValueError if one of them has no effect."""
    changed = apply_overrides(config, values, ALTERNATIVES)
    check_effective(changed, values)
    return changed
