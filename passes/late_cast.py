"""late_cast: an array that is read in parts is widened part by part.

before:  ``x = widened(x); x[:, 0:n] * w[0] + x[:, 1:n + 1] * w[1] + …``
after:   ``widened(x[:, 0:n]) * w[0] + widened(x[:, 1:n + 1]) * w[1] + …``

So a causal convolution that computes in float32 doesn't copy its bfloat16 input to float32 first:
each tap widens what it reads, in the registers of the operation that needs it. Slices, pads and
concatenations may stand in between, and move narrow elements then. Every element is converted by
the same operation as before, so that it is the same to the bit, NaNs included; a compiled reduction
may sum in another order, and what is fused otherwise may round otherwise without one (on a CPU, by
an ulp: seen with SiLU over four taps of bf16[2,8,4]). The derivative is the original's: cotangents
are added in the wide type and rounded once. `jax.linear_transpose` of the rewritten function
takes no derivative, and raises. Floats are widened so, and no integers. A call that hands out a
constant beside the array is not looked into, as that of a `jnp.pad` whose operand's gradient is
taken, for which jax keeps the padding; `lax.pad` is.

On a convolution of bf16[1,16384,4096] by four taps, libtpu 0.0.52 estimates 402,888 TPU7x cycles
before and 310,050 after, and the 269 MB of float32 are gone. Its backward, in either order of
optimizing and differentiating, takes 796,718 before and 763,561 after, and 1,074 MB for 1,342:
there the cotangents' pads stay. With SiLU, behind the three tokens before, the forward takes
547,036 before and 397,067 after, and the backward of examples/gated_delta_net.py 2,589,608 and
2,580,292. It can lose: with a SiLU written in line, the gradients of rows, taps and the tokens
before take 1,290,048 before and 1,403,482 after, where the taps' gradients read narrow windows.
`relower cost` of both says which it is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..matchers.graph import Scope
from ..matchers.in_kernel import in_kernel
from ..matchers.widened import Widened, conversion, find_widened, may_be_cut, widens
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts.moved import moved

LEAST_BYTES = 1 << 20
"""A wide copy smaller than this stays in fast memory whatever is done: a rule of thumb."""

_TROUBLES = {
    "other-reader": (
        "the whole array is read in the wide type too",
        "slices, or pads and concatenations that are read through slices",
    ),
    "pad-constant": (
        "what a pad adds is not known to be a number of the narrow type",
        "a constant that the narrow type holds exactly",
    ),
    "joined": (
        "what is joined to the array is not known to be widened from the same type",
        "arrays converted in the same body from one type to one other, or exact constants",
    ),
}


def _find(scope: Scope, index: int) -> Match | None:
    eqn = scope.eqns[index]
    if not may_be_cut(scope, eqn.outvars[0]):
        return None  # nearly all: asked of every conversion of a program
    if set(eqn.params) - {"new_dtype", "weak_type", "sharding"} or eqn.params["sharding"]:
        return None
    dtypes = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not all(map(_is_float, dtypes)) or not eqn.invars[0].aval.shape:
        return None
    if dtypes[0] == dtypes[1]:
        return None  # a weak type made a strong one
    if in_kernel(scope) is not False:
        return None  # what a kernel reads from its Refs is in registers
    found = find_widened(scope, index)
    return None if found is None else Match(scope, index, {"widened": found})


@functools.cache
def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _widened(match: Match) -> Widened:
    found: Widened = match.captures["widened"]
    return found


def _widens(match: Match) -> Reason | None:
    narrow, wide = match.eqn.invars[0].aval.dtype, match.eqn.outvars[0].aval.dtype
    if widens(narrow, wide):
        return None
    return Reason("narrowing", "the conversion loses bits, so that it matters where it stands",
                  f"{narrow} to {wide}", "a type that holds each value of the first")  # fmt: skip


def _requirement(code: str, sentence: str) -> Requirement:
    said, wanted = _TROUBLES[code]

    def check(match: Match) -> Reason | None:
        found = next((t.found for t in _widened(match).troubles if t.code == code), None)
        return None if found is None else Reason(code, said, found, wanted)

    return Requirement(code, sentence, check)


def _profitable(match: Match) -> Reason | None:
    found, out = _widened(match), match.eqn.outvars[0].aval
    if found.windows < 2:
        return Reason("one-window", "one part is cut out, which is widened in passing",
                      f"{found.windows}", "two parts or more")  # fmt: skip
    sources = (match.scope.eqns[i].outvars[0].aval for i in found.sources)
    size = max(math.prod(a.shape) for a in sources) * out.dtype.itemsize
    if size >= LEAST_BYTES:
        return None
    return Reason("small", "the wide copy is small", f"{size:,} bytes",
                  f"{LEAST_BYTES:,} bytes or more")  # fmt: skip


def _replace(match: Match) -> Replacement:
    found, wide = _widened(match), match.eqn.outvars[0].aval.dtype
    converts = [match.scope.eqns[i] for i in found.sources]
    narrow = match.eqn.invars[0].aval.dtype

    def late(*xs: jax.Array) -> list[jax.Array]:
        windows = moved(found, xs, narrow, tangents=False)
        return [lax.convert_element_type(w, wide) for w in windows]

    def early(primals: Any, tangents: Any) -> tuple[Any, Any]:
        wider = [lax.convert_element_type(t, wide) for t in tangents]
        return differentiable(*primals), moved(found, wider, wide, tangents=True)

    differentiable = jax.custom_jvp(late)
    differentiable.defjvp(early)

    operands = tuple(e.invars[0] for e in converts)
    moves = tuple((id(s.eqn), s.operands, s.results) for s in found.steps)
    key = (moves, tuple(number for number, _ in found.leaves), narrow, wide)
    results = tuple(var for _, var in found.leaves)
    return Replacement(
        operands, results, lambda *xs: differentiable(*xs), key, also=tuple(found.members)
    )


def before(x: jax.Array, taps: jax.Array) -> jax.Array:
    """A convolution of ``bf16[batch, tokens + 3, d]`` by ``f32[4, d]``, in float32."""
    wide, tokens = x.astype(jnp.float32), x.shape[1] - 3
    windows = [lax.slice_in_dim(wide, i, i + tokens, axis=1) for i in range(4)]
    return sum((w * taps[i] for i, w in enumerate(windows[1:], 1)), windows[0] * taps[0])


def after(x: jax.Array, taps: jax.Array) -> jax.Array:
    """The same, each window widened by itself."""
    tokens = x.shape[1] - 3
    parts = [lax.slice_in_dim(x, i, i + tokens, axis=1) for i in range(4)]
    windows = [w.astype(jnp.float32) for w in parts]
    return sum((w * taps[i] for i, w in enumerate(windows[1:], 1)), windows[0] * taps[0])


PASS = Pass(
    name="late_cast",
    contract=Contract.BITWISE,
    summary="an array widened and then sliced → sliced and then widened",
    measure="elements moved in the wide type",
    suggest="cut the parts out first and widen each, `f(x)[a:b]` → `f(x[a:b])`, f the conversion",
    roots=lambda: frozenset({conversion()}),
    find=_find,
    requirements=(
        Requirement("narrowing", "The conversion widens.", _widens),
        _requirement("other-reader", "Only parts of the array are read."),
        _requirement("pad-constant", "Pads add a constant that the narrow type holds."),
        _requirement("joined", "What is joined to it is widened likewise, or such a constant."),
    ),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((1, 1027, 256), jnp.bfloat16),
                jax.ShapeDtypeStruct((4, 256), jnp.float32),
            ),
            "a convolution's taps",
        ),
    ),
)
