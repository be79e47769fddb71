"""Ahead-of-time compilation of a plan's programs for an absent GPU, and analysis of the results.

`chips` finds the compiler and describes GPUs to it; `worker` runs it in a separate process.
`hlo_text` and `hlo_cost` read optimized programs; `reports` decides whether they fit. `compiling`
is the entry point for plans, `chip_profile` for the prices of a model's layers.
"""
