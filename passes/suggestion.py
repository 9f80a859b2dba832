"""What to write in the source instead, so that a pass has nothing to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Edit:
    """How to rewrite one expression of the source, where it has a known form.

    The template is Python. ``{value}`` and ``{index}`` are the parts of a subscript, ``{0}`` and
    ``{1}`` the arguments of a call, ``{call}`` a call without its closing parenthesis; ``{lax}``
    and ``{jnp}`` are what the file calls `jax.lax` and `jax.numpy`. ``{0}`` may stand in it several
    times, the first to be evaluated first; ``{new:bits}`` is a name that the file doesn't have.
    What depends on a shape is to be read from the arguments, so that the text is right for others.
    """

    form: Literal["subscript", "call"]
    template: str
    names: tuple[str, ...] = ()
    """Of a call: what the function may be called, as in ``argsort`` of ``jnp.argsort(x)``."""
    arguments: int | None = None
    """Of a call: how many positional arguments it has; None for any."""
    keywords: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Of a call: keywords that it may have, with the values that change nothing."""
    given: str = field(default="", compare=False)
    """What is known of the values here, and would make the text wrong where it isn't so."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Span:
    """Where an expression stands in a file; lines from 1, columns from 0 in UTF-8 bytes."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Suggestion:
    """The change of the source that makes a site unnecessary."""

    sentence: str
    edits: tuple[Edit, ...] = ()
    """By form of the expression, where the change is mechanical."""
    span: Span | None = None
    """The expression that the site was traced from; None where jax kept no columns."""
    spans: tuple[Span, ...] = ()
    """All of them, where one body is run by several calls."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a report."""
        span = None if self.span is None else self.span.to_json()
        return {"sentence": self.sentence, "span": span}
