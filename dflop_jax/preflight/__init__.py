"""Checks before a run: what a model folder, a data file and this machine amount to."""
