"""Task lists of a step and their order, for runtime and scheduler; and their simulation."""
