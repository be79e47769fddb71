"""The front door: what a model's name and a data file amount to, before anything is run."""
