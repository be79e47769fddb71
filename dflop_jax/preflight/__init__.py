"""Checks of a model folder, a dataset and this machine before a run."""
