"""The environment variables that `dflop launch` gives a process.

`processes.find_processes` reads those of the first group, which scripts may set themselves;
`supervised` reads those of the second.
"""

from __future__ import annotations

COORDINATOR_ENV = "DFLOP_COORDINATOR"
NUM_PROCESSES_ENV = "DFLOP_NUM_PROCESSES"
PROCESS_ID_ENV = "DFLOP_PROCESS_ID"
DEVICES_ENV = "DFLOP_DEVICES_PER_PROCESS"
LOCAL_NUMBER_ENV = "DFLOP_LOCAL_PROCESSES"  # processes of the run on this host
LOCAL_INDEX_ENV = "DFLOP_LOCAL_ID"  # and which of those this is

RUN_ENV = "DFLOP_RUN"  # the name of a launch, the same at all its restarts
RESTARTS_ENV = "DFLOP_RESTARTS"  # how often the run was started again; 0: this is the first start
STEP_FILE_ENV = "DFLOP_STEP_FILE"  # a file that the first step of a start makes
