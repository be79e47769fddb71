"""Compiles every program of a plan for a GPU that is not here, and reads what came out.

`chips` finds the compiler and describes GPUs to it, `worker` runs it in a process of its own;
`hlo_text`, `hlo_products` and `hlo_cost` read optimized programs, and `reports` says whether they
fit. `compiling` is the way in, for the prices of a model's layers `chip_profile`.
"""
