"""What a case says of its step's outputs, for the numerics gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import InputError

STANDARD = ("tokens_kept", "loss", "mean_log_prob", "last_log_prob", "entropy", "grad_norm")
"""The scalars that every case names, or says it has none of."""

Where = str | Callable[[Any], Any]
"""A path in the step's output, as in ``1/loss``, or a function of the output."""

Replicate = Literal["rounding", "arguments"] | Callable[[tuple[Any, ...], int], tuple[Any, ...]]


@dataclass(frozen=True)
class Numerics:
    """Where the numerics gate finds what it compares, and how one step leads to the next.

    A path is that of the output's leaves, or of a subtree, as
    ``jax.tree_util.keystr(path, simple=True, separator="/")`` writes it.
    """

    grads: Where
    """The gradients: every leaf of them is compared."""
    params: Where | None
    """The parameters after the step; None where the function updates none."""
    metrics: Mapping[str, Where | None]
    """Scalars by name: all of `STANDARD`, each with None where the step has no such figure
    (``grad_norm`` is then computed from the gradients), and any others."""
    advance: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] | None = None
    """``advance(output, arguments)`` gives the arguments of the next step; needed for more than
    one."""
    args: Callable[..., tuple[Any, ...]] | None = None
    """Makes the arguments to run on, where the case's own are shapes: ``args()``, or ``args(mesh)``
    of a case with a mesh."""
    replicate: Replicate = "rounding"
    """How a replicate of the reference may differ: ``"rounding"`` moves results of its operations
    by a unit in the last place, ``"arguments"`` the floats among its arguments; or
    ``replicate(arguments, seed)`` gives arguments that are as good, as in another order."""

    def __post_init__(self) -> None:
        """Refuses what would leave something unread without a word.

        Raises:
            InputError: a standard metric isn't mentioned, or something is of another type.
        """
        if not isinstance(self.metrics, Mapping):
            raise InputError(f"numerics: metrics is a {type(self.metrics).__name__}; wanted a "
                             "mapping from names to paths, functions or None")  # fmt: skip
        missing = [name for name in STANDARD if name not in self.metrics]
        if missing:
            raise InputError(
                f"numerics: metrics doesn't mention {', '.join(missing)}; wanted a path or a "
                "function for each, or None where the step has none"
            )
        wanted = {"grads": self.grads, "params": self.params, **self.metrics}
        for name, where in wanted.items():
            optional = name != "grads"
            if not (isinstance(where, str) or callable(where) or (optional and where is None)):
                raise InputError(f"numerics: {name} is {where!r}; wanted a path or a function")
        if not callable(self.replicate) and self.replicate not in ("rounding", "arguments"):
            raise InputError(
                f"numerics: replicate is {self.replicate!r}; wanted 'rounding', 'arguments' or a "
                "function of the arguments and a seed"
            )
