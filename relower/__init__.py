"""Rewrite JAX programs, and prove what the rewrite did to the TPU program."""
