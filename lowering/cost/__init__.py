"""What a compiled TPU program costs: figures read from the compiler, each with where it is from.

Nothing here imports jax but `api.cost`, which lowers a function.
"""
