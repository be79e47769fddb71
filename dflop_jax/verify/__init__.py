"""Verification of published weights: a round trip through shards, and a run beside transformers."""
