from dflop_jax.sim.predict import simulate

__all__ = ["simulate"]
