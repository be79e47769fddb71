"""The evaluations of DFLOP (arXiv 2603.25120) and DIP (2504.14145) in simulation: `make paper`, or
one file a result."""
