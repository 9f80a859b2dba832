"""The whole-step numerics gate: what N steps compute, beside a replicate of the reference."""
