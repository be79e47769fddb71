"""Compiles every program of a plan for a GPU that is not here, and reads what came out.

`chips` describes GPUs to the compiler, `toolchain` finds the compiler and `child` runs it in a
process of its own; `hlo_text` and `hlo_cost` read optimized programs, `needed` says what they had
to compute and `memory` whether they fit. `compiling` is the way in.
"""
