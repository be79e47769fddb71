"""Simulation of steps on the runtime's own task lists."""
