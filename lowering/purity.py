"""Which operations have no effect beyond their results.

Level ``dataflow`` moves, merges and drops such operations, so this is a list of what may be, never
of what may not: an operation that no rule names here keeps its place among the effects. Left out
on purpose: collectives and anything else that communicates, ``rng`` and ``rng_bit_generator``,
``optimization_barrier`` (its point is to keep two equal values apart), sharding constraints (one
that nothing reads still steers the partitioner), calls of kernels, and calls of functions.
"""

from __future__ import annotations

from .ir import Op

_LEAVES = frozenset(
    """
    abs add and atan2 bitcast_convert broadcast_in_dim cbrt ceil cholesky clamp compare complex
    concatenate constant convert convolution cosine count_leading_zeros divide dot_general
    dynamic_broadcast_in_dim dynamic_gather dynamic_iota dynamic_pad dynamic_reshape dynamic_slice
    dynamic_update_slice exponential exponential_minus_one fft floor gather get_dimension_size imag
    iota is_finite log log_plus_one logistic maximum minimum multiply negate not or pad partition_id
    popcnt power real reduce_precision remainder replica_id reshape reverse round_nearest_afz
    round_nearest_even rsqrt select set_dimension_size shift_left shift_right_arithmetic
    shift_right_logical sign sine slice sqrt subtract tan tanh transpose triangular_solve xor
    """.split()
)
_APPLIERS = frozenset({"map", "reduce", "reduce_window", "scatter", "select_and_scatter", "sort"})
_BRANCHES = frozenset({"case", "if"})


def is_pure_leaf(op: Op) -> bool:
    """No regions, no effect: the operation is its name, attributes and operands."""
    dialect, _, name = op.name.partition(".")
    if op.regions or op.successors:
        return False
    if dialect == "stablehlo":
        return name in _LEAVES or (name == "custom_call" and op.pure_call)
    return dialect == "chlo"


def applies_regions(op: Op) -> bool:
    """Regions are functions applied to elements, a number of times that ends."""
    return op.name.startswith("stablehlo.") and op.name.partition(".")[2] in _APPLIERS


def is_branch(op: Op) -> bool:
    """Runs one of its regions once; pure if those are."""
    return op.name.startswith("stablehlo.") and op.name.partition(".")[2] in _BRANCHES


def is_loop(op: Op) -> bool:
    """A ``stablehlo.while``."""
    return op.name == "stablehlo.while"
