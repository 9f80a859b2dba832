"""Values by element as polynomials of a cotangent and of what the forward left.

Two programs that compute one polynomial compute the same but for rounding, in whatever order and by
whatever residuals they do so. Whole expressions that neither the cotangent nor a logistic goes into
are taken as variables.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from jax import dtypes

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn, Var
from ..compat.primitives import primitive
from .graph import Scope
from .origin import origin
from .swiglu import half_of, narrower

Leaf = Hashable
Monomial = tuple[int, ...]
"""The numbers of its variables, in order, each as often as it is a factor."""
Polynomial = dict[Monomial, float]

_COTANGENT: Leaf = "cotangent"
_DEEP = 24
"""Operations behind one another that are looked through."""
_MOST = 24
"""Monomials, beyond which a polynomial is none that anybody looks for."""


class Polynomials:
    """The polynomials of one body's values."""

    def __init__(self, scope: Scope, cotangent: Var) -> None:
        """``cotangent`` is a variable of ``scope``."""
        self.narrowed: list[Any] = []
        """Types that something made of the cotangent or a logistic is rounded to."""
        self._scope = scope
        self._cotangent = cotangent
        self._numbers: dict[Leaf, int] = {}
        self._leaves: list[Leaf] = []
        self._atoms: dict[Leaf, Atom] = {}
        self._known: dict[tuple[int, Atom], Polynomial | None] = {}

    def of(self, atom: Atom) -> Polynomial | None:
        """The polynomial that an atom of the body is; None where there is none of few terms."""
        return self._of(self._scope, atom, _DEEP)

    def atom_of(self, leaf: Leaf) -> Atom | None:
        """The atom of the body that a variable is, if there is one."""
        return self._atoms.get(leaf)

    def gate_of(self, found: Polynomial | None) -> tuple[Leaf, tuple[Leaf, ...]] | None:
        """``gate``, where a polynomial is ``cotangent * gate * logistic(gate)``.

        And one further factor, where there is one.
        """
        if found is None or len(found) != 1:
            return None
        for gate in self._leaves:
            dh = (_COTANGENT, gate, _logistic(gate))
            for more in ((), *((leaf,) for leaf in self._leaves)):
                if found == self._terms((1.0, *dh, *more)):
                    return gate, more
        return None

    def up_of(
        self, found: Polynomial | None, gate: Leaf, more: tuple[Leaf, ...] = ()
    ) -> Leaf | None:
        """``up``, where a polynomial is ``cotangent * up * silu'(gate)``, times ``more``."""
        if found is None or len(found) != 3:
            return None
        s = _logistic(gate)
        for up in self._leaves:
            dh = (_COTANGENT, up, *more)
            if found == self._terms((1.0, *dh, s), (1.0, *dh, gate, s), (-1.0, *dh, gate, s, s)):
                return up
        return None

    def _terms(self, *terms: tuple[Any, ...]) -> Polynomial | None:
        """The polynomial of these coefficients and factors, None where one of them isn't known."""
        made: Polynomial = {}
        for coefficient, *factors in terms:
            if any(f not in self._numbers for f in factors):
                return None
            made[tuple(sorted(self._numbers[f] for f in factors))] = coefficient
        return made

    def _variable(self, leaf: Leaf) -> Polynomial:
        if leaf not in self._numbers:
            self._numbers[leaf] = len(self._leaves)
            self._leaves.append(leaf)
        return {(self._numbers[leaf],): 1.0}

    def _of(self, scope: Scope, atom: Atom, deep: int) -> Polynomial | None:
        here: Atom | None = None  # the last on the way that is an atom of the body
        while not jaxprs.is_literal(atom):
            here = atom if scope is self._scope else here
            if atom is self._cotangent:
                return self._variable(_COTANGENT)
            step = scope.step(atom)
            if step is None:
                break
            scope, atom = step
        if jaxprs.is_literal(atom):
            return _constant(atom.val)
        key = id(scope), atom
        if key not in self._known:
            self._known[key] = self._made(scope, atom, deep)
        found = self._known[key]
        leaf = self._single(found)
        if leaf is not None and here is not None and here.aval.ndim == 2:
            self._atoms.setdefault(leaf, here)
        return found

    def _single(self, found: Polynomial | None) -> Leaf | None:
        """The variable that a polynomial is."""
        if found is None or len(found) != 1:
            return None
        ((monomial, coefficient),) = found.items()
        return self._leaves[monomial[0]] if len(monomial) == 1 and coefficient == 1 else None

    def _made(self, scope: Scope, var: Var, deep: int) -> Polynomial | None:
        made = scope.definition(var)
        if made is None:
            # Maybe the slice of what a forward loop has stacked.
            source = origin(scope, var).value
            crossed = source.scope is not scope or source.atom is not var
            if crossed and deep:
                return self._of(source.scope, source.atom, deep - 1)
            return self._variable((id(scope), var))
        eqn = scope.eqns[made[0]]
        half = half_of(eqn, made[1], var.aval.ndim - 1)
        if half is not None:
            whole = scope.resolve(eqn.invars[0])
            return self._variable(("half", half, id(whole.scope), whole.atom))
        found = self._computed(scope, eqn, deep - 1) if deep else None
        if found is None or not self._is_ours(found):
            passed = found if _is_exact(eqn) and found is not None else None
            return passed or self._variable((id(scope), var))
        if _is_cast(eqn) and narrower(var.aval.dtype, eqn.invars[0].aval.dtype):
            self.narrowed.append(var.aval.dtype)
        return found if len(found) <= _MOST else None

    def _is_ours(self, found: Polynomial) -> bool:
        """Whether the cotangent or a logistic goes into it, or no variable at all."""
        used = {self._leaves[i] for monomial in found for i in monomial}
        return not used or any(
            leaf == _COTANGENT or (isinstance(leaf, tuple) and leaf[0] == "logistic")
            for leaf in used
        )

    def _computed(self, scope: Scope, eqn: Eqn, deep: int) -> Polynomial | None:
        """What an equation computes; None where that is no polynomial of its operands."""
        kind = eqn.primitive
        if kind is primitive("logistic_p"):
            leaf = self._single(self._of(scope, eqn.invars[0], deep))
            return None if leaf is None else self._variable(_logistic(leaf))
        if kind is primitive("broadcast_in_dim_p"):
            constant = self._of(scope, eqn.invars[0], deep)
            return constant if constant is not None and set(constant) <= {()} else None
        if _is_exact(eqn) or _is_cast(eqn):
            return self._of(scope, eqn.invars[0], deep)
        if kind is primitive("neg_p"):
            return _scaled(self._of(scope, eqn.invars[0], deep), -1.0)
        if kind is primitive("integer_pow_p") and eqn.params["y"] == 2:
            one = self._of(scope, eqn.invars[0], deep)
            return _product(one, one)
        if not any(kind is primitive(n) for n in ("mul_p", "add_p", "add_jaxvals_p", "sub_p")):
            return None
        one, other = (self._of(scope, a, deep) for a in eqn.invars)
        if kind is primitive("mul_p"):
            return _product(one, other)
        return _sum(one, _scaled(other, -1.0 if kind is primitive("sub_p") else 1.0))


def _logistic(leaf: Leaf) -> Leaf:
    return ("logistic", leaf)


def _is_cast(eqn: Eqn) -> bool:
    return eqn.primitive is primitive("convert_element_type_p") and all(
        dtypes.issubdtype(v.aval.dtype, np.floating) for v in (*eqn.invars, *eqn.outvars)
    )


def _is_exact(eqn: Eqn) -> bool:
    """Whether an equation hands every value on as it is."""
    if eqn.primitive is primitive("name_p") or eqn.primitive is primitive("pvary_p"):
        return True
    return _is_cast(eqn) and not narrower(eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype)


def _constant(value: Any) -> Polynomial | None:
    array = np.asarray(value)
    if array.ndim or not dtypes.issubdtype(array.dtype, np.floating):
        return None
    return {(): float(array)} if array else {}


def _scaled(found: Mapping[Monomial, float] | None, by: float) -> Polynomial | None:
    return None if found is None else {m: c * by for m, c in found.items()}


def _sum(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None:
        return None
    made = {m: a.get(m, 0.0) + b.get(m, 0.0) for m in (*a, *b)}
    return {m: c for m, c in made.items() if c}


def _product(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None or len(a) * len(b) > _MOST:
        return None
    made: Polynomial = {}
    for m, c in a.items():
        for n, d in b.items():
            factors = tuple(sorted((*m, *n)))
            made[factors] = made.get(factors, 0.0) + c * d
    return {m: c for m, c in made.items() if c}
