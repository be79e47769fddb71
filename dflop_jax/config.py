"""The configuration of a run: nested frozen dataclasses, dotted overrides, JSON.

The annotation of a field has its type (or a `Literal` of names) and bounds. Checks, conversions and
the command line are derived from the fields.
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
PosInt = Annotated[int, Meta(ge=1, description="at least 1")]
UInt = Annotated[int, _FROM_0]
PosFloat = Annotated[float, _ABOVE_0]
UFloat = Annotated[float, _FROM_0]
Fraction = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Decay = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]

Names = tuple[str, ...]
Dtype = Literal["float32", "bfloat16"]
Policy = Literal["auto", "dflop", "orch", "dip", "blind", "megatron", "pytorch"]
Effort = Literal["quick", "full"]
LrSchedule = Literal["constant", "linear", "cosine", "wsd"]


def option(default: Any, description: str) -> Any:
    """A field with its default and its help line."""
    return field(default=default, metadata={"help": description})


# Above it, a step without a gradient shrinks a second moment by less than bfloat16 can tell.
BFLOAT16_BETA2 = 0.99


@dataclass(frozen=True)
class ModelConfig:
    factory: str = option("models.llava:build", "import path MODULE:FUNCTION that builds the model")
    size: str = option("tiny", "size name from the model's table, or a folder with a config.json")
    weights: Names = option(
        (),
        "to begin with: a folder of published weights, or a run (RUN, RUN@STEP); or MODULE=FOLDER",
    )
    dtype: Dtype = option("float32", "compute dtype: float32 or bfloat16")
    attention_kernel: Literal["auto", "cudnn", "pallas", "xla"] = option(
        "auto",
        "auto (the fastest with equal bits), cudnn (the fastest), pallas (both GPUs only), xla",
    )


@dataclass(frozen=True)
class DataConfig:
    path: str = option(
        "",
        "LLaVA-format JSON/JSONL file or folder, .tar shards, Parquet or Arrow files, OWNER/NAME "
        "in the hub's cache, a .yaml mixture; empty: scenes",
    )
    eval_path: str = option(
        "",
        "records to evaluate on, as data.path; empty: what training leaves out of it",
    )
    factory: str = option(
        "", "import path MODULE:FUNCTION of a source of your own: f(config.data, model, split)"
    )
    root: Names = option(
        (),
        "folders of the media, searched in turn; nothing outside them is opened; empty: the file's",
    )
    n_samples: PosInt = option(4096, "size of the embedded dataset")
    seed: int = option(0, "seed of the embedded dataset and of the epoch order")
    changed: Literal["refuse", "ok"] = option(
        "refuse", "if a run resumes with other data than its checkpoint's: refuse, or ok (continue)"
    )
    max_tiles: PosInt = option(9, "maximum AnyRes grid tiles of an image, without the base tile")
    max_frames: PosInt = option(32, "maximum frames sampled from a video")
    min_pixels: PosInt = option(65_536, "minimum pixels of an image at native resolution")
    max_pixels: PosInt = option(16_777_216, "maximum pixels of an image at native resolution")
    max_clip_pixels: PosInt = option(
        25_165_824, "maximum pixels of a whole clip at native resolution"
    )
    frames_per_s: PosFloat = option(2.0, "frames sampled per second of a clip at native resolution")
    max_tokens: PosInt = option(1024, "longest sample in LLM tokens; see data.oversize")
    oversize: Literal["drop", "truncate", "error"] = option(
        "truncate",
        "sample above max_tokens: drop, truncate (its first max_tokens, media whole or not at all) "
        "or error; one that no compiled shape holds is dropped, or an error",
    )
    tokenizer: str = option("", "a tokenizer.json, or a model's folder; empty or bytes: bytes")
    columns: Names = option((), "names of columns that are not usual: messages=chat,image=pictures")
    loss_on_prompts: bool = option(
        False, "train on all text of a record, not on answers alone; held-out losses stay so"
    )
    blank_images: bool = option(False, "replace every picture by grey (a control experiment)")
    max_bad_fraction: UFloat = option(0.1, "share of undecodable samples that stops the run")
    sample_timeout_s: PosFloat = option(60.0, "seconds of decoding after which a sample is bad")
    sample_memory_bytes: PosFloat = option(4e9, "memory of decoding above which a sample is bad")
    workers: PosInt = option(2, "samples of files decoded at once, in a process each")
    prefetch: PosInt = option(2, "batches kept ready ahead of training")


@dataclass(frozen=True)
class PlanConfig:
    policy: Policy = option(
        "auto", "dflop, orch, dip, auto (the fastest), or a baseline; see README"
    )
    devices: UInt = option(0, "devices to use; 0: all")
    hardware: str = option("", "plan for plan.devices of these: a100-80, h100, ...; empty: here")
    node: UInt = option(0, "devices that share a node; 0: those of a host, or of its data sheet")
    buckets: PosInt = option(4, "maximum compiled shapes (buckets) per module")
    max_model: UInt = option(0, "largest tensor-parallel degree tried; 0: by model size and node")
    max_stage: UInt = option(0, "largest pipeline degree tried (of dip: ranks); 0: by model size")
    max_microbatches: UInt = option(0, "maximum microbatches of a batch; 0: by batch and memory")
    microbatches_per_stage: UInt = option(
        0,
        "microbatches of a group for each stage of a loop of stages: more keep it fuller and hold "
        "more memory; 0: the fastest of 1, 2, 4 and 8",
    )
    rounds: UInt = option(
        0,
        "passes of a microbatch through such a loop, each through other layers (interleaving): "
        "more keep it fuller and send more; 0: the faster of 1 and 2",
    )
    memory_bytes: UFloat = option(0.0, "device memory that plans fill, as 80GB; 0: 95% of jax's")
    zero: Literal["auto", "1", "2", "3"] = option(
        "auto",
        "what data ranks shard: 1 optimizer state, 2 gradients too, 3 parameters too (ZeRO), or "
        "auto (by module, the cheapest that fits into memory)",
    )
    shard_devices: UInt = option(
        0,
        "neighbouring devices that shard what `zero` names; 0: all devices, or those of a node "
        "where that is faster",
    )
    effort: Effort = option("full", "quick, or full: evaluate more placements and bucket sizes")
    sampled_batches: PosInt = option(4, "global batches simulated for each candidate")
    drift: Fraction = option(1 / 3, "share of drifted batches, of other media, in judging plans")
    finalists: UInt = option(
        3,
        "plans whose programs are timed before one is chosen, and batches scheduled by these times "
        "(1: time the best plan; 0: choose and schedule by the profile)",
    )
    profile_samples: PosInt = option(2000, "samples whose shapes are read for the data profile")
    redecide_every: UInt = option(
        0,
        "steps between checks whether recent samples need another plan, to which the run changes "
        "if that saves more time than it costs; 0: never",
    )


@dataclass(frozen=True)
class ScheduleConfig:
    work: UInt = option(0, "units of work of one batch's solve; 0: as much as a step hides")
    ahead: PosInt = option(4, "global batches scheduled ahead")
    correct: bool = option(
        True,
        "correct predicted times by measured ones while that shortens steps; a resumed run as well",
    )


@dataclass(frozen=True)
class TrainConfig:
    steps: PosInt = option(100, "optimizer steps")
    epochs: UFloat = option(0.0, "epochs, in place of train.steps; 0: train.steps")
    max_hours: UFloat = option(0.0, "hours from start at which the run saves and ends; 0: none")
    global_batch: PosInt = option(64, "samples per optimizer step, at most all of the data")
    learning_rate: PosFloat = option(1e-3, "peak learning rate")
    schedule: LrSchedule = option(
        "cosine",
        "rate after warm-up: constant, linear, cosine, or wsd (constant, last steps linear)",
    )
    warmup_steps: UInt = option(10, "steps of linear warm-up")
    warmup_ratio: Fraction = option(0.0, "fraction of all steps, in place of warmup_steps; 0: off")
    decay_steps: UInt = option(0, "last steps, over which schedule wsd decays; 0: a tenth of all")
    final_lr_fraction: Fraction = option(0.1, "learning rate at the end of a decay over its peak")
    optimizer: Literal["adamw", "lion"] = option("adamw", "adamw or lion")
    weight_decay: UFloat = option(0.01, "weight decay of matrices")
    weight_decays: Names = option((), "weight decay of parts, as vision=0,llm=0.1")
    clip_norm: UFloat = option(1.0, "global gradient norm is clipped to this; 0: off")
    z_loss: UFloat = option(
        0.0,
        "weight of the squared log of the sum of exponentials, added to the loss; not in reported "
        "ones",
    )
    label_smoothing: Decay = option(
        0.0, "fraction of a target that is spread over the vocabulary; not in reported losses"
    )
    loss_spike: UFloat = option(
        0.0, "skip a step whose gradient norm is above this many times its median (8, say); 0: off"
    )
    max_bad_steps: PosInt = option(
        10, "steps in a row without an update (gradients not finite, or spikes) that end the run"
    )
    beta1: Decay = option(0.9, "decay of the first moment of adamw and lion")
    beta2: Decay = option(0.95, "decay of adamw's second moment, and of lion's average")
    eps: PosFloat = option(1e-8, "AdamW divides by the root of the second moment and this")
    moments_dtype: Dtype = option("float32", "dtype of optimizer moments: float32 or bfloat16")
    ema: Decay = option(
        0.0, "decay of an average of the parameters that evaluations use (such as 0.999); 0: none"
    )
    learning_rates: Names = option((), "peak rates of parts, as vision=2e-6,connector=1e-5")
    stage: Literal["full", "connector", "llm"] = option(
        "full", "what trains: full, connector (encoders and LLM frozen) or llm (all else frozen)"
    )
    freeze: Names = option((), "parts to freeze: vision, audio, connector, llm")
    lora_rank: UInt = option(0, "rank of LoRA, which freezes parts without a rate; 0: off")
    lora_targets: Names = option(
        (), "matrices that LoRA adapts, as llm,vision.up,conn*.out (* stands for any); empty: llm"
    )
    lora_ranks: Names = option(
        (), "ranks of targets, as vision=4,llm.query=32; the last match counts"
    )
    lora_alpha: PosFloat = option(16.0, "strength of LoRA: it is scaled by lora_alpha / rank")
    lora_dropout: Decay = option(0.0, "dropout of an adapter's input in training")
    seed: int = option(0, "seed of the parameters")
    remat: Literal["auto", "none", "dots", "named", "layers", "segment"] = option(
        "auto",
        "what backward recomputes, for less memory: none, dots (all but products), named (all but "
        "attention), layers (each from its input), segment (all of it from its input), or auto (by "
        "module, the cheapest that fits into memory)",
    )
    peak_flops: UFloat = option(0.0, "peak FLOP/s of a device, for the MFU; 0: by its name")
    profile_steps: str = option(
        "", "A:B: jax traces steps A to B (from 0, both included) to RUN/xprof; empty: off"
    )
    log_every: UInt = option(
        0,
        "steps between lines of a log, and those that TensorBoard and W&B get; 0: about 20 lines, "
        "and every step",
    )
    tensorboard: bool = option(False, "also write the metrics to RUN/tensorboard (tensorboardX)")
    wandb_project: str = option("", "also send the metrics to this project of W&B; empty: off")
    wandb_entity: str = option("", "user or team of the project; empty: W&B's default")
    wandb_name: str = option("", "name of the run in W&B; empty: the run folder's")
    wandb_tags: Names = option((), "tags of the run in W&B, as first,second")
    eval_every: UInt = option(0, "steps between evaluations; 0: only at the end")
    eval_samples: UInt = option(0, "held-out samples; 0: all of train.eval_fraction, or none")
    eval_fraction: Decay = option(
        0.0,
        "fraction of data.path that is held out, of which train.eval_samples are evaluated; 0: "
        "those alone are held out",
    )

    @property
    def evaluates(self) -> bool:
        """Whether samples are held out and evaluated."""
        return bool(self.eval_samples or self.eval_fraction)


@dataclass(frozen=True)
class CheckpointConfig:
    every: UInt = option(0, "steps between checkpoints, beside `every_s`; 0: none by steps")
    every_s: UFloat = option(600.0, "seconds between checkpoints; 0: none by time")
    keep: PosInt = option(3, "newest checkpoints that are kept")
    keep_every: UInt = option(0, "the first checkpoint of every so many steps stays, too; 0: none")
    keep_best: bool = option(
        False, "also keep the checkpoint of the lowest held-out loss: each such evaluation saves"
    )

    @property
    def saves(self) -> bool:
        """Whether a run saves at all."""
        return bool(self.every or self.every_s)


@dataclass(frozen=True)
class DistributedConfig:
    coordinator: str = option("", "HOST:PORT of process 0; empty: as the launcher or cluster says")
    num_processes: UInt = option(0, "processes of the run; 0: as the launcher says")
    process_id: int = option(-1, "this process, from 0; -1: as the launcher says")
    connect_timeout_s: PosFloat = option(120.0, "longest wait for all processes at the start")
    peer_timeout_s: PosFloat = option(15.0, "silence, from 3 s on, after which a process is lost")
    hang_factor: UFloat = option(
        20.0,
        "factor over the longest measured duration after which a step, save or evaluation counts "
        "as hung and the run ends (exit code 4); 0: off",
    )
    hang_min_s: PosFloat = option(
        120.0, "shortest such deadline; unmeasured sections have 30 times this"
    )


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
    run_dir: str = option(
        "runs/run", "folder of the run; {time} in it becomes the time of the start"
    )
    cache_dir: str = option("runs/cache", "folder of cached profiles and compiled programs")

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
    """Raise ValueError where a requested field has no effect, or the warm-up exceeds the run."""
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
    """`config` with dotted fields replaced, each of which must have an effect."""
    changed = overridden(config, values, ALTERNATIVES)
    check_effective(changed, values)
    return changed
