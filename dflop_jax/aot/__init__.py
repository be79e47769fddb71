"""Compile every program of a plan for a GPU that is not on this machine, and read the results.

`chips` finds the compiler and describes GPUs to it, `worker` runs it in a process of its own;
`hlo_text` and `hlo_cost` read optimized programs, and `reports` says whether they fit. `compiling`
is the entry for plans, `chip_profile` for the prices of a model's layers.
"""
