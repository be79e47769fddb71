"""The configuration of a run: nested frozen dataclasses, dotted overrides, JSON.

Each field's `Annotated` text is its help line; the command line is generated from it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

import msgspec

from dflop_jax.records import REMAT

POLICIES = ("auto", "dflop", "orch", "blind", "megatron", "pytorch")


@dataclass(frozen=True)
class ModelConfig:
    factory: Annotated[str, "import path MODULE:FUNCTION that builds the model"] = (
        "models.llava:build"
    )
    size: Annotated[str, "size name from the model's table, or a folder with a config.json"] = (
        "tiny"
    )
    weights: Annotated[
        tuple[str, ...], "folder of published weights to begin with, or MODULE=FOLDER,..."
    ] = ()
    dtype: Annotated[str, "compute dtype: float32 or bfloat16"] = "float32"
    attention_kernel: Annotated[str, "auto (by platform), xla, or pallas (GPUs only)"] = "auto"


@dataclass(frozen=True)
class DataConfig:
    path: Annotated[
        str, "LLaVA-format JSON/JSONL file or folder, .tar shards, a .yaml mixture; empty: scenes"
    ] = ""
    root: Annotated[str, "folder of the media; empty: the folder of the JSON file"] = ""
    n_samples: Annotated[int, "size of the embedded dataset"] = 4096
    seed: Annotated[int, "seed of the embedded dataset and of the epoch order"] = 0
    max_tiles: Annotated[int, "most AnyRes grid tiles of an image, the base tile not counted"] = 9
    max_frames: Annotated[int, "most frames sampled from a video"] = 32
    max_tokens: Annotated[int, "longest sample in LLM tokens; longer ones are treated as below"] = (
        1024
    )
    oversize: Annotated[
        str, "sample above max_tokens: drop, truncate (text, then media) or error"
    ] = "truncate"
    tokenizer: Annotated[
        str, "a tokenizer.json, or a model's folder with its chat template; empty: bytes"
    ] = ""
    blank_images: Annotated[bool, "replace every picture by grey (a control experiment)"] = False
    max_bad_fraction: Annotated[float, "share of undecodable samples that stops the run"] = 0.1
    workers: Annotated[int, "threads that decode and pack ahead"] = 2
    prefetch: Annotated[int, "batches kept ready ahead of training"] = 2


@dataclass(frozen=True)
class PlanConfig:
    policy: Annotated[
        str, "dflop, orch, auto (the faster of both), or a baseline; see the README"
    ] = "dflop"
    devices: Annotated[int, "devices to use; 0: all"] = 0
    hardware: Annotated[
        str, "plan for plan.devices of these, without having them: a100-80, h100, ...; empty: here"
    ] = ""
    buckets: Annotated[int, "most compiled shapes (buckets) per module"] = 4
    max_model: Annotated[int, "largest tensor-parallel degree tried"] = 2
    max_stage: Annotated[int, "largest pipeline degree inside a segment tried"] = 4
    max_microbatches: Annotated[int, "most microbatches of a global batch tried"] = 16
    memory_bytes: Annotated[float, "memory per device; 0: what the device reports"] = 0.0
    effort: Annotated[str, "quick, or full: more placements and sizes of buckets are tried out"] = (
        "full"
    )
    sampled_batches: Annotated[int, "global batches simulated for each candidate"] = 4
    profile_samples: Annotated[int, "samples whose shapes are read for the data profile"] = 2000


@dataclass(frozen=True)
class ScheduleConfig:
    time_limit_s: Annotated[float, "cap of one batch's solve; its work is bounded anyway"] = 5.0
    ahead: Annotated[int, "global batches scheduled ahead"] = 4
    correct: Annotated[
        bool, "correct predictions by observed times; schedules then depend on the clock"
    ] = False


@dataclass(frozen=True)
class TrainConfig:
    steps: Annotated[int, "optimizer steps"] = 100
    global_batch: Annotated[int, "samples per optimizer step"] = 64
    learning_rate: Annotated[float, "peak learning rate of AdamW"] = 1e-3
    warmup_steps: Annotated[int, "linear warm-up steps before the cosine decay"] = 10
    final_lr_fraction: Annotated[float, "learning rate at the end over its peak"] = 0.1
    weight_decay: Annotated[float, "AdamW weight decay of matrices"] = 0.01
    clip_norm: Annotated[float, "global gradient norm is clipped to this; 0: off"] = 1.0
    beta2: Annotated[float, "AdamW second-moment decay"] = 0.95
    learning_rates: Annotated[
        tuple[str, ...], "peak rates of single parts, as vision=2e-6,connector=1e-5"
    ] = ()
    stage: Annotated[
        str, "what trains: full, connector (encoders and LLM frozen) or llm (all else frozen)"
    ] = "full"
    freeze: Annotated[tuple[str, ...], "parts to freeze: vision, audio, connector, llm"] = ()
    lora_rank: Annotated[int, "rank of LoRA on the LLM's matrices, the LLM frozen; 0: off"] = 0
    lora_alpha: Annotated[float, "strength of LoRA: it is scaled by lora_alpha / lora_rank"] = 16.0
    seed: Annotated[int, "seed of the parameters"] = 0
    remat: Annotated[
        str,
        "what backward computes again, for less memory: none, layers, dots (all but products), or "
        "auto (layers where they would not fit)",
    ] = "auto"
    tensorboard: Annotated[bool, "also write the metrics to RUN/tensorboard (tensorboardX)"] = False
    wandb_project: Annotated[str, "also send the metrics to this project of W&B; empty: off"] = ""
    eval_every: Annotated[int, "steps between evaluations; 0: only at the end"] = 0
    eval_samples: Annotated[int, "held-out samples; 0: no evaluation"] = 0


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[int, "steps between checkpoints; 0: none"] = 100
    keep: Annotated[int, "newest checkpoints that are kept"] = 3


@dataclass(frozen=True)
class DistributedConfig:
    coordinator: Annotated[
        str, "HOST:PORT of process 0; empty: dflop launch, Slurm, Open MPI or Kubernetes say"
    ] = ""
    num_processes: Annotated[int, "processes of the run; 0: as the launcher says"] = 0
    process_id: Annotated[int, "this process, from 0; -1: as the launcher says"] = -1
    secret_file: Annotated[
        str, "file with the secret of the run; empty: DFLOP_SECRET, or the user's own file"
    ] = ""
    connect_timeout_s: Annotated[float, "longest wait for all processes at the start"] = 120.0
    peer_timeout_s: Annotated[float, "silence after which a process counts as hung"] = 30.0


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
    run_dir: Annotated[str, "folder the run writes to"] = "runs/run"
    cache_dir: Annotated[str, "folder of cached profiles and compiled programs"] = "runs/cache"

    def __post_init__(self) -> None:
        checks = {
            "model.dtype": (self.model.dtype, ("float32", "bfloat16")),
            "model.attention_kernel": (self.model.attention_kernel, ("auto", "xla", "pallas")),
            "data.oversize": (self.data.oversize, ("drop", "truncate", "error")),
            "plan.policy": (self.plan.policy, POLICIES),
            "plan.effort": (self.plan.effort, ("quick", "full")),
            "train.stage": (self.train.stage, ("full", "connector", "llm")),
            "train.remat": (self.train.remat, ("auto", *REMAT)),
        }
        for name, (value, allowed) in checks.items():
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
        at_least_one = {
            "train.steps": self.train.steps,
            "train.global_batch": self.train.global_batch,
            "plan.buckets": self.plan.buckets,
            "plan.max_model": self.plan.max_model,
            "plan.max_stage": self.plan.max_stage,
            "plan.max_microbatches": self.plan.max_microbatches,
            "plan.sampled_batches": self.plan.sampled_batches,
            "plan.profile_samples": self.plan.profile_samples,
            "data.n_samples": self.data.n_samples,
            "data.max_tokens": self.data.max_tokens,
            "data.max_frames": self.data.max_frames,
            "data.max_tiles": self.data.max_tiles,
            "data.workers": self.data.workers,
            "data.prefetch": self.data.prefetch,
            "schedule.ahead": self.schedule.ahead,
            "checkpoint.keep": self.checkpoint.keep,
        }
        for name, number in at_least_one.items():
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        above_zero = {
            "train.learning_rate": self.train.learning_rate,
            "train.lora_alpha": self.train.lora_alpha,
            **{f"train.learning_rates {k}": v for k, v in named_rates(self.train).items()},
            "distributed.connect_timeout_s": self.distributed.connect_timeout_s,
            "distributed.peer_timeout_s": self.distributed.peer_timeout_s,
        }
        for name, amount in above_zero.items():
            if not 0 < amount < float("inf"):
                raise ValueError(f"{name}={amount} must be a finite number above 0")
        not_negative = {
            "train.warmup_steps": self.train.warmup_steps,
            "train.weight_decay": self.train.weight_decay,
            "train.clip_norm": self.train.clip_norm,
            "train.lora_rank": self.train.lora_rank,
            "train.eval_every": self.train.eval_every,
            "train.eval_samples": self.train.eval_samples,
            "plan.devices": self.plan.devices,
            "plan.memory_bytes": self.plan.memory_bytes,
            "data.max_bad_fraction": self.data.max_bad_fraction,
            "checkpoint.every": self.checkpoint.every,
            "distributed.num_processes": self.distributed.num_processes,
        }
        for name, amount in not_negative.items():
            if not 0 <= amount < float("inf"):
                raise ValueError(f"{name}={amount} must be a finite number, 0 or above")


def named_rates(train: TrainConfig) -> dict[str, float]:
    """`train.learning_rates` by name.

    Raises:
      ValueError: an entry that is not NAME=NUMBER, or a name given twice.
    """
    rates: dict[str, float] = {}
    for entry in train.learning_rates:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if name in rates:
            raise ValueError(f"train.learning_rates gives {name!r} twice; drop one of them")
        try:
            rates[name] = float(value)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise ValueError(
                f"train.learning_rates has {entry!r}; write NAME=RATE, such as vision=2e-6"
            )
    return rates


def fields(kind: type = Config, prefix: str = "") -> list[tuple[str, Any, str]]:
    """(dotted name, type, help) of every leaf field."""
    out: list[tuple[str, Any, str]] = []
    hints = get_type_hints(kind, include_extras=True)
    for f in dataclasses.fields(kind):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            out += fields(hint, f"{prefix}{f.name}.")  # type: ignore[arg-type]
        else:
            out.append((prefix + f.name, hint.__origin__, hint.__metadata__[0]))
    return out


def override(config: Config, values: Mapping[str, str | Sequence[str]]) -> Config:
    """`config` with dotted fields replaced; strings are converted to the field's type.

    Raises:
      ValueError: unknown name (with the nearest one) or a value of the wrong type.
    """
    tree = msgspec.to_builtins(config)
    known = {name: kind for name, kind, _ in fields()}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else "; see --help for the names"
            raise ValueError(f"unknown override {name}{hint}")
        node = tree
        *parents, leaf = name.split(".")
        for parent in parents:
            node = node[parent]
        if "tuple" in str(known[name]) and isinstance(value, str):
            value = [v for v in value.split(",") if v]
        node[leaf] = value
    try:
        return msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as e:
        raise ValueError(str(e).replace("`$.", "`")) from None
