"""The evaluations of DFLOP (arXiv 2603.25120), DIP (2504.14145) and OrchMLLM (2503.23830) in
simulation. Run `make paper`, or `python -m experiments.paper --only NAME` for one result."""
