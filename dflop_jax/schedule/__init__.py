from dflop_jax.schedule.batch import Capacity, capacity_of, oversize
from dflop_jax.schedule.correction import Correction, Monitor
from dflop_jax.schedule.online import WORK_PER_S, quick_schedule, schedule_batch
from dflop_jax.schedule.shapes.choose import BucketChoice, choose_buckets
from dflop_jax.schedule.shapes.problem import ShapeProblem
from dflop_jax.schedule.shapes.spare import arrival_buckets
from dflop_jax.schedule.solver.local_search import balance
from dflop_jax.schedule.worker import ScheduleWorker
