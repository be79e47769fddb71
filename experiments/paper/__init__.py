"""The evaluation of DFLOP (arXiv 2603.25120) in simulation: `make paper`, or one file a result."""
