from dflop_jax.schedule.batch import Capacity, capacity_of, oversize
from dflop_jax.schedule.batch_scheduler import WORK_PER_S, quick_schedule, schedule_batch
from dflop_jax.schedule.buckets.choose import BucketChoice, choose_buckets
from dflop_jax.schedule.buckets.problem import BucketProblem
from dflop_jax.schedule.buckets.sizes import arrival_buckets
from dflop_jax.schedule.local_search import balance
from dflop_jax.schedule.worker import ScheduleWorker
