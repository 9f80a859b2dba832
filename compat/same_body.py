"""Whether two jaxprs are one program: the same equations with the same params, in order.

For a body whose meaning is known, such as a library's kernel traced anew, against one found in a
program. Whatever this file can't compare counts as different.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import jaxprs
from .jaxprs import Atom, Eqn, Var

_SAYS_NOTHING = frozenset({
    "ctx_mesh",  # the mesh that a call was traced under: a kernel's body has none
    "debug_info",
    "name_and_src_info",
    "origin",  # of a kernel's operand, by the name of the argument
})  # fmt: skip


RULES = frozenset({
    "bwd", "fwd", "fwd_jaxpr_thunk", "jvp_fun", "jvp_jaxpr_fun", "out_trees", "rule",
})  # fmt: skip
"""Params that hold derivative and batching rules while they are Python functions."""


def same_body(a: Any, b: Any, besides: frozenset[str] = frozenset()) -> bool:
    """Whether two bodies are equal but for names and source lines, and the params ``besides``."""
    return _Comparison(_SAYS_NOTHING | besides).same_body(a, b)


def same_params(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether params of two equations of one primitive say the same: arrays by their bits."""
    return a.keys() == b.keys() and all(
        _Comparison(_SAYS_NOTHING)._same(name, value, b[name]) for name, value in a.items()
    )


@dataclasses.dataclass(frozen=True)
class _Comparison:
    says_nothing: frozenset[str]

    def same_body(self, a: Any, b: Any) -> bool:
        left, right = jaxprs.opened(a), jaxprs.opened(b)
        renamed: dict[Var, Var] = {}
        return (
            _bound((*left.constvars, *left.invars), (*right.constvars, *right.invars), renamed)
            and self._same_values(jaxprs.consts(a), jaxprs.consts(b))
            and len(left.eqns) == len(right.eqns)
            and all(self._same_equation(x, y, renamed) for x, y in zip(left.eqns, right.eqns))
            and self._same_atoms(left.outvars, right.outvars, renamed)
        )

    def _same_equation(self, a: Eqn, b: Eqn, renamed: dict[Var, Var]) -> bool:
        return (
            a.primitive is b.primitive
            and self._same_atoms(a.invars, b.invars, renamed)
            and a.params.keys() == b.params.keys()
            and all(self._same(n, v, b.params[n]) for n, v in a.params.items())
            and _bound(a.outvars, b.outvars, renamed)
        )

    def _same_atoms(self, a: Sequence[Atom], b: Sequence[Atom], renamed: Mapping[Var, Var]) -> bool:
        return len(a) == len(b) and all(self._same_atom(x, y, renamed) for x, y in zip(a, b))

    def _same_atom(self, a: Atom, b: Atom, renamed: Mapping[Var, Var]) -> bool:
        if jaxprs.is_literal(a) or jaxprs.is_literal(b):
            both = jaxprs.is_literal(a) and jaxprs.is_literal(b)
            return both and _same_type(a, b) and self._same_values([a.val], [b.val])
        return renamed.get(a) is b

    def _same_values(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        return len(a) == len(b) and all(self._same("", x, y) for x, y in zip(a, b))

    def _same(self, name: str, a: Any, b: Any) -> bool:
        """Whether two params, or parts of them, are equal."""
        if name in self.says_nothing or a is b:
            return True
        if type(a) is not type(b):
            return False
        if jaxprs.is_body(a):
            return self.same_body(a, b)
        if isinstance(a, np.ndarray | np.generic):
            same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            return bool(same)
        if isinstance(a, tuple | list):
            return self._same_values(a, b)
        if isinstance(a, Mapping):
            return a.keys() == b.keys() and all(self._same(str(k), v, b[k]) for k, v in a.items())
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            fields = (f.name for f in dataclasses.fields(a))
            return all(self._same(n, getattr(a, n), getattr(b, n)) for n in fields)
        if hasattr(a, "str_short"):
            return bool(a.str_short() == b.str_short())
        return bool(a == b)


def _bound(a: Sequence[Var], b: Sequence[Var], renamed: dict[Var, Var]) -> bool:
    renamed.update(zip(a, b))
    return len(a) == len(b) and all(_same_type(x, y) for x, y in zip(a, b))


def _same_type(a: Atom, b: Atom) -> bool:
    """Refs print what they refer to; shardings, which no kernel's operand has, aren't printed."""
    return type(a.aval) is type(b.aval) and a.aval.str_short() == b.aval.str_short()
