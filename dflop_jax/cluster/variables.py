"""The variables that `dflop launch` gives a process: who it is, whom it meets, whom it tells.

`processes.find_processes` reads the first ones, and scripts may set them themselves; `told` reads
the last ones.
"""

from __future__ import annotations

COORDINATOR_ENV = "DFLOP_COORDINATOR"
NUM_PROCESSES_ENV = "DFLOP_NUM_PROCESSES"
PROCESS_ID_ENV = "DFLOP_PROCESS_ID"
DEVICES_ENV = "DFLOP_DEVICES_PER_PROCESS"
LOCAL_NUMBER_ENV = "DFLOP_LOCAL_PROCESSES"  # processes of the run on this host
LOCAL_INDEX_ENV = "DFLOP_LOCAL_ID"  # and which of those this is
FULL_NUMBER_ENV = "DFLOP_FULL_PROCESSES"  # that the run began with; fewer may be left

AGENT_ENV = "DFLOP_AGENT"  # the folder in which a process tells its agent how far it is
RUN_ENV = "DFLOP_RUN"  # names what one launch runs, all its restarts together
RESTARTS_ENV = "DFLOP_RESTARTS"  # how often it was started again; 0 or nothing: this is its start
LEAST_ENV = "DFLOP_MIN_PROCESSES"  # that it goes on with where others are gone; nothing: with all
FEWER_ENV = "DFLOP_FEWER_PROCESSES"  # that it would have without one host, or process of one host
