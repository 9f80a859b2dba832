"""What a caller of `optimize` or `explain` asks for, checked and put together once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from ..compat import jaxprs
from ..compat.jaxprs import Body
from . import registry
from .base import Contract, Measured, Pass
from .disable import Disabled, split
from .frozen import Frozen, Request, argument_paths, assumed, declared, request

Choose = Mapping[str, str] | Literal["heuristic", "measured"] | Measured | None


@dataclass(frozen=True)
class Asked:
    """What is to be done to a function, whichever it is."""

    passes: tuple[Pass, ...]
    """Those to run, by preference."""
    named: frozenset[str]
    """Those among them that were asked for by name: each must find a site."""
    measured: Measured | None
    """How to measure where sites are decided by estimated cycles."""
    frozen: Frozen | None
    assume: frozenset[str]
    disabled: Disabled
    check_facts: bool

    @classmethod
    def of(
        cls,
        passes: Iterable[str | Pass] | None = None,
        contract: str | None = None,
        disable: Iterable[str] = (),
        choose: Choose = None,
        frozen: Any = None,
        assume: str | Iterable[str] | None = None,
        check_facts: bool = False,
    ) -> Asked:
        """The options of `optimize` as they are given.

        Raises:
          ValueError: an unknown pass, contract, way or assumption, a choice for a pass that knows
            one way only, something said of gradients without the pass that it is for, a contract
            where each pass is named, or a pass that is named and disabled.
          TypeError: a declaration of another kind, or passes that are no sequence of names.
        """
        measured = Measured() if choose == "measured" else choose
        by_rule = measured == "heuristic" or isinstance(measured, Measured)
        # Anything but ways by pass is refused by the registry.
        ways = None if by_rule else cast(Any, measured)
        off, sites = split(disable)
        chosen = registry.select(passes, _contract(contract), off, ways)
        asked = cls(
            chosen.passes,
            chosen.named,
            measured if isinstance(measured, Measured) else None,
            declared(frozen),
            assumed(assume),
            sites,
            check_facts,
        )
        asked._check_said_to_a_pass()
        return asked

    def _check_said_to_a_pass(self) -> None:
        if (self.frozen or self.assume) and all(p.program is None for p in self.passes):
            names = ", ".join(p.name for p in self.passes) or "none"
            raise ValueError(
                f"{'frozen' if self.frozen else 'assume'} is for the pass frozen_gradient: found "
                f"the passes {names}, wanted it among them"
            )

    def by(self, passes: Sequence[Pass]) -> Asked:
        """The same of other passes."""
        return replace(self, passes=tuple(passes))

    def on_state(self) -> Asked:
        """The same of a function that returns its objects' state beside its result."""
        frozen = self.frozen
        if frozen is None:
            return self
        grads = frozen.grads
        return replace(self, frozen=replace(frozen, grads=lambda out: grads(out[0])))

    def request(
        self,
        fn: Any,
        args: Any,
        kwargs: Any,
        is_traced: Callable[[Any], bool],
        closed: Body,
        out_tree: Any,
    ) -> Request:
        """What is asked of passes that judge the whole program, for the trace of one call."""
        names = argument_paths(fn, args, kwargs, is_traced)
        if len(names) != len(jaxprs.invars(closed)):
            names = []  # which of them are static arguments isn't known here
        return request(self.frozen, self.assume, names, out_tree)


def _contract(name: str | None) -> Contract | None:
    try:
        return None if name is None else Contract(name)
    except ValueError:
        known = ", ".join(repr(c.value) for c in Contract)
        raise ValueError(f"contract is {name!r}; wanted one of {known}") from None
