"""Task graph of a step, order of its tasks for runtime and scheduler, and simulation of steps."""
