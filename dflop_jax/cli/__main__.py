import sys

from dflop_jax.cli.main import main

sys.exit(main())
