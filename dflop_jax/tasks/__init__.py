"""What a step runs and in which order, for the runtime, the scheduler and the simulator alike."""
