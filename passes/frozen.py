"""What a user declares frozen, and where its gradients come out of a function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

ASSUMPTIONS = ("finite_grads",)
"""What may be assumed; ``finite_grads``: no gradient that a mask multiplies by zero is inf or NaN,
and which zero of the two the product is doesn't matter."""

_PATHS_SHOWN = 8


def _whole(out: Any) -> Any:
    return out


@dataclass(frozen=True)
class Frozen:
    """Which leaves of a gradient tree are frozen, and which output is that tree.

    Attributes:
      leaves: a regex, searched for in each leaf's path as ``jax.tree_util.keystr`` writes it with
        ``simple=True, separator="/"`` (``layers/router/kernel``); a function of that path that
        returns a bool; or a tree of bools, True where frozen, of the gradients' structure or a
        prefix of it, as of ``in_axes``: a bool in place of a subtree stands for all its leaves.
      grads: takes the function's output and returns the gradients in it. By default the whole
        output is the gradients, as that of ``jax.grad(loss)`` is.

    Raises:
      TypeError: ``leaves`` is none of these, or a function of other than one argument.
      ValueError: the regex can't be compiled.
    """

    leaves: Any
    grads: Callable[[Any], Any] = _whole

    def __post_init__(self) -> None:
        """Say what is wrong with the declaration where it is made."""
        if not callable(self.grads):
            raise TypeError(
                f"Frozen: grads is {self.grads!r}; wanted a function of the output, as in "
                "lambda out: out[1]"
            )
        if isinstance(self.leaves, str):
            try:
                re.compile(self.leaves)
            except re.error as fault:
                raise ValueError(
                    f"frozen: the regex {self.leaves!r} can't be compiled: {fault}"
                ) from None
        elif callable(self.leaves):
            _check_arity(self.leaves)
        else:
            for leaf in jax.tree.leaves(self.leaves):
                if not isinstance(leaf, bool):
                    raise TypeError(
                        f"frozen: found {leaf!r} of type {type(leaf).__name__} in a tree of bools; "
                        "wanted a regex, a function of a path, or a tree of True and False"
                    )


def _check_arity(predicate: Callable[..., Any]) -> None:
    try:
        inspect.signature(predicate).bind("path")
    except TypeError:
        raise TypeError(
            f"frozen: found a function with the parameters {inspect.signature(predicate)}; "
            "wanted one that takes a leaf's path, a string, and nothing else"
        ) from None
    except ValueError:  # a builtin that doesn't tell its parameters
        return


def declared(frozen: Any) -> Frozen | None:
    """What ``optimize(frozen=…)`` was given, as a `Frozen`; None stays None.

    Raises:
      TypeError: a lone bool, which names no leaf, or what `Frozen` doesn't take.
    """
    if isinstance(frozen, bool):
        raise TypeError(
            f"frozen: found {frozen!r}, which names no leaf; wanted a regex, a function of a path, "
            f"or a tree of True and False (Frozen({frozen!r}), for all of the output)"
        )
    return frozen if frozen is None or isinstance(frozen, Frozen) else Frozen(frozen)


def assumed(assume: Any) -> frozenset[str]:
    """What ``optimize(assume=…)`` was given: a name, several, or None.

    Raises:
      ValueError: an unknown assumption.
    """
    names = (assume,) if isinstance(assume, str) else tuple(assume or ())
    for name in names:
        if name not in ASSUMPTIONS:
            known = ", ".join(map(repr, ASSUMPTIONS))
            raise ValueError(f"assume: found {name!r}; wanted one of {known}")
    return frozenset(names)


@dataclass(frozen=True)
class Declared:
    """One leaf that was declared frozen."""

    path: str
    output: int
    """Its position among the function's flat outputs."""
    told_where: bool
    """Whether the user said which output is the gradients: then what makes one may be a product
    that no backward pass of jax's made."""


@dataclass(frozen=True)
class Request:
    """All that the search for frozen gradients is told of a function."""

    leaves: tuple[Declared, ...] = ()
    inputs: tuple[str, ...] = ()
    """Paths of the traced argument leaves, in order; may be empty."""
    outputs: tuple[str, ...] = ()
    """Paths of the output leaves, in order; may be empty."""
    finite_grads: bool = False
    again: bool = False
    """Whether the program was judged before its last rewrite: only what is to go counts."""


@dataclass(frozen=True)
class _Leaf:
    """Stands for an output: a number would do, were it not that a function can return one."""

    output: int


def request(
    frozen: Frozen | None, assume: frozenset[str], inputs: Sequence[str], out_tree: Any
) -> Request:
    """Resolve a declaration on the output tree of a traced function.

    Raises:
      ValueError: no leaf matches, or ``grads`` or the tree of bools doesn't fit the output.
      TypeError: the predicate returns something else than a bool.
    """
    try:
        out = jax.tree.unflatten(out_tree, map(_Leaf, range(out_tree.num_leaves)))
    except Exception as fault:  # a node type that takes arrays only
        if frozen is not None:
            raise ValueError(
                f"frozen: the output {out_tree} can't be taken apart: {fault}"
            ) from None
        return Request(inputs=tuple(inputs), finite_grads="finite_grads" in assume)
    outputs = tuple(paths(out))
    leaves = () if frozen is None else tuple(_resolve(frozen, out, out_tree))
    return Request(leaves, tuple(inputs), outputs, "finite_grads" in assume)


def paths(tree: Any) -> list[str]:
    """The path of every leaf, as in ``layers/router/kernel``."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def argument_paths(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    is_traced: Callable[[Any], bool],
) -> list[str]:  # fmt: skip
    """Paths of the argument leaves that are traced, each from its parameter's name on."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    named = {names[i] if i < len(names) else f"[{i}]": arg for i, arg in enumerate(args)}
    found: list[str] = []
    for name, arg in (*named.items(), *sorted(kwargs.items())):
        leaves = jax.tree.leaves(arg)
        for path, leaf in zip(paths(arg), leaves, strict=True):
            if is_traced(leaf):
                found.append(f"{name}/{path}" if path else name)
    return found


def _resolve(frozen: Frozen, out: Any, out_tree: Any) -> list[Declared]:
    try:
        grads = frozen.grads(out)
    except Exception as fault:
        raise ValueError(
            f"frozen: grads can't take the gradients out of {_shown(out_tree)}: "
            f"{type(fault).__name__}: {fault}"
        ) from None
    leaves = jax.tree.leaves(grads)
    if not leaves or not all(type(leaf) is _Leaf for leaf in leaves):
        raise ValueError(
            f"frozen: grads returned {_shown(jax.tree.structure(grads))} of other things than "
            "leaves of the output; wanted a part of it, as in lambda out: out[1]"
        )
    names = paths(grads)
    chosen = _chosen(frozen.leaves, names, grads)
    told = frozen.grads is not _whole
    found = zip(names, leaves, chosen, strict=True)
    return [Declared(name, leaf.output, told) for name, leaf, c in found if c]


def _chosen(leaves: Any, names: Sequence[str], grads: Any) -> list[bool]:
    if isinstance(leaves, str):
        chosen = [re.search(leaves, name) is not None for name in names]
        what = f"the regex {leaves!r}"
    elif callable(leaves):
        chosen = [_asked(leaves, name) for name in names]
        what = "the function"
    else:
        try:
            return list(jax.tree.leaves(jax.tree.broadcast(leaves, grads)))
        except ValueError:
            raise ValueError(
                f"frozen: the tree of bools has the structure {_shown(jax.tree.structure(leaves))};"
                f" wanted that of the gradients, or a prefix of it, "
                f"{_shown(jax.tree.structure(grads))}"
            ) from None
    if not any(chosen):
        shown = ", ".join(names[:_PATHS_SHOWN]) + (", …" if len(names) > _PATHS_SHOWN else "")
        raise ValueError(f"frozen: {what} matches none of {len(names)} leaves: {shown}")
    return chosen


def _asked(predicate: Callable[[str], Any], name: str) -> bool:
    answer = predicate(name)
    if not isinstance(answer, bool):
        raise TypeError(
            f"frozen: the function returned {answer!r} of type {type(answer).__name__} for "
            f"{name!r}; wanted True or False"
        )
    return answer


def _shown(structure: Any) -> str:
    text = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) <= 200 else text[:200] + "…"
