"""inverse_permutation: an argsort of a permutation is not computed by a stable sort.

before:  ``sort((p, iota, …), num_keys=1, is_stable=True)`` with ``p`` a permutation of 0 … n-1
after:   ``sort((p, iota, …), num_keys=1, is_stable=False)``, or what is better; the sorted keys are
         an iota

A permutation leaves no ties, so there is nothing for a stable sort or for further keys to decide.
It helps because the TPU compiler makes a sort stable by carrying an iota of its own beside the
operands. The compiler can't do it: it doesn't know that the keys differ. The ways, with estimated
TPU7x cycles for 81,920 positions, 106,054 before (libtpu 0.0.52):

- ``at_hand``: what the permutation is itself the argsort of; nothing.
- ``threaded``: the same, brought from the body of another scan, as a forward's for its backward,
  which then keeps it for all iterations; up to 1 GiB of it.
- ``packed``: one word for permutation and slot where 32 bits hold two positions; 20,952.
- ``pairs``: the unstable sort; 81,987.
- ``counting``: ranks counted from the integers that ``p`` is the stable order of; 227,953 where
  these are 512 different ones, 61,203 for 128, 20,663 for 8 (libtpu 0.0.50). The last of all values
  is what the others leave, so that 129 need 128 columns, a register's lanes: for 163,840 positions
  129,874 against 150,709 of pairs; with a column of its own 258,278.
- ``scatter``: each position written where ``p`` says; 568,598.
- ``window``: where all that read the inverse select it by a mask that holds only for keys in a
  window, as one shard's experts: counted in the window, −1 elsewhere.

An inverse at hand is taken first, then the cheapest by these figures; counting must save a fifth of
the sort. The scatter has to be asked for: ``choose={"inverse_permutation": "scatter"}``. Who asks
for pairs should disable argsort_packed_key too, or it packs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.primitives import primitive
from ..matchers.argsort import Argsort, find_argsort, sort_primitive
from ..matchers.graph import Scope
from ..matchers.inverse import came_by_loop, find_inverse, find_inverse_elsewhere
from ..matchers.inverse_site import inverse_call, masked_inverse, sorted_keys
from ..matchers.key_range import key_range
from ..matchers.pattern import Mismatch
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts import inverse_permutation_ways as ways
from .parts.argsort_edits import packed_edits, pairs_edits
from .parts.brought import too_large
from .parts.packed_word import WORD_BITS
from .suggestion import Suggestion

_FREE, _SORTS = ("at_hand", "threaded"), ("packed", "pairs")
_PACKED, _PAIRS = 20_952 / 81_920, 81_987 / 81_920
"""Estimated TPU7x cycles for each slot that is sorted."""
_COUNTED, _PER_COLUMN, _LANES = 0.19, 0.0047, 128
"""The same for each slot whose rank is counted, and for each column of values, up to 128."""
_WIDER, _PER_WIDE_COLUMN = 1.2, 0.0054
"""The same for more columns than a register has lanes: no fewer cycles than 256 take."""
_WORTH_IT = 0.8


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    if scope.eqns[index].primitive is sort_primitive():
        return _find_sort(scope, index)
    permutation = inverse_call(scope, index)
    if permutation is not None:
        key = sorted_keys(scope, permutation)
        match = Match(scope, index, {"permutation": permutation, "key": key})
        return match if _open(match) else None  # else the sort inside the call is the site
    masked = masked_inverse(scope, index)
    if masked is None:
        return None
    found = {name: getattr(masked, name) for name in ("operand", "key", "lo", "width", "mask",
                                                      "unmasked")}  # fmt: skip
    return Match(scope, index, found)


def _find_sort(scope: Scope, index: int) -> Match | Mismatch | None:
    found = find_argsort(scope, index)
    if found is None or isinstance(found, Mismatch):
        return found
    known = _is_permutation(scope, found)
    key = sorted_keys(scope, found.key) if known and found.key.aval.ndim == 1 else None
    match = Match(scope, index, {"argsort": found, "permutation": found.key, "key": key})
    if found.stable or found.num_keys > 1:
        return match
    # What this pass makes is a site only where there is something better.
    return match if known and _best(match) is not None else None


def _is_permutation(scope: Scope, argsort: Argsort) -> bool:
    return scope.fact(argsort.key).permutation == argsort.axis


def _permutation(match: Match) -> Reason | None:
    argsort: Argsort | None = match.captures.get("argsort")
    if argsort is None or _is_permutation(match.scope, argsort):
        return None
    fact, shape = match.scope.fact(argsort.key), argsort.key.aval.str_short(short_dtypes=True)
    if fact.permutation is not None:
        found = f"{shape}, a permutation along axis {fact.permutation}"
    elif fact.lo is None and fact.hi is None:
        found = f"{shape} of unknown range"
    else:
        lo, hi = ("unknown" if bound is None else bound for bound in (fact.lo, fact.hi))
        found = f"{shape} with lo={lo}, hi={hi}"
    wanted = f"a permutation of 0 … {argsort.length - 1} along axis {argsort.axis}"
    return Reason("not-a-permutation", "the key is not known to be a permutation", found, wanted)


def _masked_everywhere(match: Match) -> Reason | None:
    unmasked = match.captures.get("unmasked")
    if unmasked is None:
        return None
    return Reason("read-unmasked", "the inverse is also read outside the window of keys",
                  unmasked, "selects by a mask of that window only")  # fmt: skip


def _ways(match: Match) -> Mapping[str, ways.Way]:
    if "operand" in match.captures:
        return {"window": ways.window(match)}
    scope, permutation, found = match.scope, match.captures["permutation"], {}
    here = there = None
    if permutation.aval.ndim == 1:
        here = find_inverse(scope, permutation, match.index)
        there = find_inverse_elsewhere(scope, permutation) if here is None else None
    found["at_hand"] = ways.at_hand(match, here)
    by_loop = here is not None and came_by_loop(scope, here)
    large = None if there is None else too_large(scope, permutation)
    found["threaded"] = large or ways.at_hand(match, here if by_loop else None, there)
    if "argsort" in match.captures:
        found |= {name: getattr(ways, name)(match) for name in ("packed", "pairs", "scatter")}
    return found | {"counting": ways.counting(match)}


def _open(match: Match) -> Mapping[str, Replacement]:
    return {name: w for name, w in _ways(match).items() if isinstance(w, Replacement)}


def _best(match: Match) -> Replacement | None:
    found = _open(match)
    free = next((found[name] for name in (*_FREE, "window") if name in found), None)
    if free is not None:
        return free
    if "counting" in found:
        lo, hi = match.scope.fact(match.captures["key"]).range(match.captures["key"].aval.dtype)
        if _counting_costs(match, hi - lo) is None:
            return found["counting"]
    return next((found[name] for name in _SORTS if name in found), None)


def _replace(match: Match) -> Replacement:
    best = _best(match)
    assert best is not None
    return best


def _counting_costs(match: Match, columns: int) -> Reason | None:
    """Why counting doesn't pay, where so many values have a column."""
    (n,) = match.captures["key"].aval.shape
    sort = n * (_PACKED if 2 * max(n - 1, 0).bit_length() <= 32 else _PAIRS)
    if columns <= _LANES:
        counted = n * (_COUNTED + _PER_COLUMN * columns)
    else:
        counted = n * max(_WIDER, _PER_WIDE_COLUMN * columns)
    if counted <= _WORTH_IT * sort:
        return None
    most = _WORTH_IT * sort
    return Reason("costs-more", f"to count ranks in {columns} columns does not pay against a sort",
                  f"{counted:,.0f} estimated cycles", f"at most {most:,.0f}")  # fmt: skip


def _profitable(match: Match) -> Reason | None:
    if "operand" in match.captures:
        return _counting_costs(match, match.captures["width"])
    if _best(match) is not None:
        return None
    key = match.captures["key"]  # counting is the only way that is open, or a scatter
    if key is None:
        return Reason("costs-more", "a scatter costs more than the sort",
                      "no better way", "one, or this asked for by name")  # fmt: skip
    lo, hi = match.scope.fact(key).range(key.aval.dtype)
    return _counting_costs(match, hi - lo)


def _suggest(match: Match) -> Suggestion:
    if "operand" in match.captures:
        return Suggestion("count ranks in the window of keys that is read, and mask the others")
    way = next(name for name, found in _open(match).items() if found.key == _replace(match).key)
    if way in _FREE:
        return Suggestion("read the order's own argument: it is the inverse that is sorted for")
    argsort: Any = match.captures.get("argsort")  # there is one where a sort is a way
    if way == "pairs":
        said = "sort unstably: a permutation has no ties"
        return Suggestion(said, pairs_edits(match.scope, argsort, num_keys=1))
    if way == "packed":
        known = key_range(match.scope, argsort, WORD_BITS)
        edits = () if known is None else packed_edits(match.scope, argsort, known)
        return Suggestion("sort one word of permutation and position", edits)
    return Suggestion("count the ranks from the keys: a one-hot matrix of them, summed up along it")


def before(scores: jax.Array) -> jax.Array:
    """The rank of each score, by way of the order; ``scores`` is ``f32[n]``."""
    return jnp.argsort(jnp.argsort(scores))


def after(scores: jax.Array) -> jax.Array:
    """The same, with a second sort that need not be stable."""
    order = jnp.argsort(scores)
    return lax.sort((order, lax.iota(jnp.int32, order.size)), is_stable=False, num_keys=1)[1]


PASS = Pass(
    name="inverse_permutation",
    contract=Contract.BITWISE,
    summary="argsort of a permutation → what it is the argsort of, a packed or unstable sort, "
    "or ranks counted in a window",
    measure="argsorts of permutations, by their operands and keys",
    suggest=_suggest,
    roots=lambda: frozenset({sort_primitive(), primitive("jit_p"), primitive("select_n_p")}),
    find=_find,
    requirements=(
        Requirement(
            "not-a-permutation",
            "The first key is known to be a permutation of 0 … n - 1 along the sort axis.",
            _permutation,
        ),
        Requirement(
            "read-unmasked",
            "Of a window, everything that reads the inverse selects it by a mask of that window.",
            _masked_everywhere,
        ),
    ),
    profitable=_profitable,
    replace=_replace,
    alternatives=_ways,
    ways=("at_hand", "threaded", "packed", "pairs", "scatter", "counting", "window"),
    before=before,
    after=after,
    examples=lambda: (Example((jax.ShapeDtypeStruct((1 << 17,), jnp.float32),), "scores"),),
)
