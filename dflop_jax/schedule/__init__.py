from dflop_jax.schedule.correction import Correction, Monitor
from dflop_jax.schedule.costs import BucketCosts, pipeline_makespan
from dflop_jax.schedule.cover import Capacity
from dflop_jax.schedule.groups import oversize
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.shapes.choose import (
    BucketChoice,
    arrival_buckets,
    choose_buckets,
    evaluate_buckets,
)
from dflop_jax.schedule.solver.balance import Assignment, balance
from dflop_jax.schedule.worker import ScheduleWorker

__all__ = [
    "Assignment",
    "BucketChoice",
    "BucketCosts",
    "Capacity",
    "Correction",
    "Monitor",
    "ScheduleWorker",
    "arrival_buckets",
    "balance",
    "choose_buckets",
    "evaluate_buckets",
    "oversize",
    "pipeline_makespan",
    "schedule_batch",
]
