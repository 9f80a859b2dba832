"""Which jaxprs an equation carries, and how its operands and results reach them.

One handler per primitive is all that the rest of relower knows about control flow: facts, the
dataflow view, the rewriter and the checker all read the same `Carried` description. A primitive
that carries a jaxpr and has no handler is reported, never entered.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from . import jaxprs
from .jaxprs import Body, Eqn


class Flow(Enum):
    """How a value passes between an equation and a body of it."""

    SAME = "same"
    """The same value, in every execution of the body."""
    CARRY = "carry"
    """A loop's carried value: the outside gives the first and takes the last."""
    SLICE = "slice"
    """One slice along the leading axis per iteration."""
    SHARD = "shard"
    """One device's part of the outer array, as the port's ``spec`` says."""
    UNKNOWN = "unknown"
    """Anything else, such as a Ref."""


@dataclass(frozen=True, slots=True)
class Port:
    """Where a body's input comes from, or where its output goes."""

    outer: int | None
    """Index into the equation's operands (of an input) or results (of an output)."""
    flow: Flow
    spec: Any = None
    """The `PartitionSpec` of a `Flow.SHARD` port."""


BodyKey = tuple[str, int | None]
"""The param's name, and the index within it where the param is a tuple of bodies."""


class Role(Enum):
    """What the equation does with a body."""

    CALL = "call"
    """Runs it once."""
    BRANCH = "branch"
    """Runs one of several."""
    LOOP = "loop"
    """Runs it any number of times, zero included."""
    PREDICATE = "predicate"
    """Runs it to decide whether a loop goes on."""
    KERNEL = "kernel"
    """Runs it on Refs: inputs are references and there are no outputs."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A body that relower enters."""

    key: BodyKey
    body: Body
    role: Role
    inputs: tuple[Port, ...]
    """One per `jaxprs.invars(body)`."""
    outputs: tuple[Port, ...]
    """One per output of the body."""


@dataclass(frozen=True, slots=True)
class NotEntered:
    """A body, or a function that would make one, that relower doesn't enter."""

    param: str
    reason: str
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class Carried:
    """All that an equation carries."""

    entered: tuple[Entered, ...] = ()
    not_entered: tuple[NotEntered, ...] = ()


NOTHING = Carried()


def carried(eqn: Eqn) -> Carried:
    """The bodies of ``eqn``, entered or listed with the reason why not."""
    if eqn.primitive in leaves():
        return NOTHING
    handler = _handler(eqn.primitive)
    if handler is not None:
        return handler(eqn)
    # Most equations carry nothing: find that out without building anything.
    for value in eqn.params.values():
        kind = type(value)
        if kind in _BODY_TYPES or (
            isinstance(value, tuple | list) and not _BODY_TYPES.isdisjoint(map(type, value))
        ):
            return _list_bodies(eqn)
    return NOTHING


# The commonest primitives of those that carry nothing: knowing them saves reading their params.
_LEAVES = """
abs_p add_p and_p argmax_p argmin_p broadcast_in_dim_p clamp_p concatenate_p convert_element_type_p
cos_p cumsum_p div_p dot_general_p dynamic_slice_p dynamic_update_slice_p eq_p erf_p exp_p gather_p
ge_p gt_p integer_pow_p iota_p is_finite_p le_p log_p log1p_p logistic_p lt_p max_p min_p mul_p ne_p
neg_p not_p or_p pad_p pow_p reduce_and_p reduce_max_p reduce_min_p reduce_or_p reduce_sum_p rem_p
reshape_p rev_p rsqrt_p select_n_p shift_left_p shift_right_arithmetic_p shift_right_logical_p
sign_p sin_p slice_p sort_p sqrt_p square_p squeeze_p stop_gradient_p sub_p tanh_p top_k_p
transpose_p xor_p
"""


@functools.cache
def leaves() -> frozenset[Any]:
    """Primitives that never carry a body, the commonest of them."""
    from jax._src import ad_util
    from jax.extend.core import primitives

    named = (getattr(primitives, name, None) for name in _LEAVES.split())
    return frozenset(p for p in (*named, ad_util.add_jaxvals_p) if p is not None)


def _list_bodies(eqn: Eqn) -> Carried:
    return Carried(
        not_entered=tuple(
            NotEntered(name, _reason(eqn, body), body)
            for name, value in eqn.params.items()
            for body in _bodies_in(value)
        )
    )


def arity(eqn: Eqn) -> tuple[int, int, dict[BodyKey, int]] | None:
    """How many operands and results an equation must have, and inputs each of its bodies.

    None where only the bodies could tell, as with `pl.run_scoped`.
    """
    entered = carried(eqn).entered
    if any(e.role is Role.KERNEL for e in entered):
        mapping = eqn.params["grid_mapping"]
        (e,) = entered
        blocks = mapping.num_index_operands + mapping.num_inputs
        captured = len(jaxprs.constvars(e.body))
        inputs = blocks + mapping.num_outputs + mapping.num_scratch_operands
        operands = captured + mapping.num_dynamic_grid_bounds + blocks
        return operands, mapping.num_outputs, {e.key: inputs}
    if not entered or any(p.outer is None for e in entered for p in e.inputs):
        return None
    # Only a cond has an operand of its own: the index of the branch.
    own = 1 if entered[0].role is Role.BRANCH else 0
    read = {p.outer for e in entered for p in e.inputs}
    bound = {p.outer for e in entered for p in e.outputs if p.outer is not None}
    return own + len(read), len(bound), {e.key: len(e.inputs) for e in entered}


def shard_map_primitive() -> Any:
    """The primitive of `jax.shard_map`."""
    from jax._src.shard_map import shard_map_p

    return shard_map_p


def with_bodies(eqn: Eqn, bodies: Mapping[BodyKey, Body]) -> Eqn:
    """``eqn`` with some of its bodies replaced by bodies of the same type."""
    params = dict(eqn.params)
    for (name, index), body in bodies.items():
        if index is None:
            params[name] = body
        else:
            several = list(params[name])
            several[index] = body
            params[name] = tuple(several)
    return eqn.replace(params=params)


def with_nested(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """Equations, each followed by those of the bodies that it runs, at every level."""
    for eqn in eqns:
        yield eqn
        for entered in carried(eqn).entered:
            yield from with_nested(jaxprs.opened(entered.body).eqns)


_BODY_TYPES = jaxprs.BODY_TYPES


def _bodies_in(value: object) -> Iterator[Body]:
    if jaxprs.is_body(value):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            if jaxprs.is_body(item):
                yield item


def _reason(eqn: Eqn, body: Body) -> str:
    avals = [v.aval for v in jaxprs.invars(body)]
    if avals and all(getattr(a, "shape", None) == () for a in avals):
        return "a combiner of scalars"
    return f"no rule for the bodies of {eqn.primitive.name}"


@functools.lru_cache(maxsize=1024)
def _same(n: int, start: int = 0) -> tuple[Port, ...]:
    return tuple(Port(start + i, Flow.SAME) for i in range(n))


def _call(param: str, *opaque: NotEntered) -> Callable[[Eqn], Carried]:
    """A primitive that runs one body once on all its operands."""

    def handler(eqn: Eqn) -> Carried:
        body = eqn.params[param]
        entered = Entered(
            (param, None), body, Role.CALL, _same(len(eqn.invars)), _same(len(eqn.outvars))
        )
        return Carried((entered,), opaque)

    return handler


def _scan(eqn: Eqn) -> Carried:
    num_consts, num_carry, num_xs, num_ys = scan_counts(eqn)
    body = eqn.params["jaxpr"]
    inputs = (
        *(Port(i, Flow.SAME) for i in range(num_consts)),
        *(Port(num_consts + i, Flow.CARRY) for i in range(num_carry)),
        *(Port(num_consts + num_carry + i, Flow.SLICE) for i in range(num_xs)),
    )
    outputs = (
        *(Port(i, Flow.CARRY) for i in range(num_carry)),
        *(Port(num_carry + i, Flow.SLICE) for i in range(num_ys)),
    )
    return Carried((Entered(("jaxpr", None), body, Role.LOOP, inputs, outputs),))


def scan_counts(eqn: Eqn) -> tuple[int, int, int, int]:
    """A scan's numbers of constants, carried values, scanned inputs and stacked outputs."""
    params = eqn.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.12: flat trees of (consts, carry, xs) and (carry, ys)
        num_consts, num_carry = (len(part) for part in params["ft_in"].unpack()[:2])
    num_xs = len(eqn.invars) - num_consts - num_carry
    return num_consts, num_carry, num_xs, len(eqn.outvars) - num_carry


def _while(eqn: Eqn) -> Carried:
    params = eqn.params
    nc, nb = params["cond_nconsts"], params["body_nconsts"]
    carry = tuple(Port(nc + nb + i, Flow.CARRY) for i in range(len(eqn.outvars)))
    test = Entered(
        ("cond_jaxpr", None),
        params["cond_jaxpr"],
        Role.PREDICATE,
        _same(nc) + carry,
        (Port(None, Flow.UNKNOWN),),
    )
    body = Entered(
        ("body_jaxpr", None),
        params["body_jaxpr"],
        Role.LOOP,
        _same(nb, nc) + carry,
        tuple(Port(i, Flow.CARRY) for i in range(len(eqn.outvars))),
    )
    return Carried((test, body))


def _cond(eqn: Eqn) -> Carried:
    inputs = _same(len(eqn.invars) - 1, 1)
    outputs = _same(len(eqn.outvars))
    return Carried(
        tuple(
            Entered(("branches", i), branch, Role.BRANCH, inputs, outputs)
            for i, branch in enumerate(eqn.params["branches"])
        )
    )


def _shard_map(eqn: Eqn) -> Carried:
    params = eqn.params
    inputs = tuple(Port(i, Flow.SHARD, spec) for i, spec in enumerate(params["in_specs"]))
    outputs = tuple(Port(i, Flow.SHARD, spec) for i, spec in enumerate(params["out_specs"]))
    return Carried((Entered(("jaxpr", None), params["jaxpr"], Role.CALL, inputs, outputs),))


def _pallas_call(eqn: Eqn) -> Carried:
    body = eqn.params["jaxpr"]
    inputs = tuple(Port(None, Flow.UNKNOWN) for _ in jaxprs.invars(body))
    maps = tuple(
        NotEntered("grid_mapping", "an index map of a Pallas kernel", m.index_map_jaxpr)
        for m in eqn.params["grid_mapping"].block_mappings
    )
    return Carried((Entered(("jaxpr", None), body, Role.KERNEL, inputs, ()),), maps)


def _run_scoped(eqn: Eqn) -> Carried:
    # Operands are bound to the body's constvars, allocated Refs to its inputs.
    body = eqn.params["jaxpr"]
    inputs = tuple(Port(None, Flow.UNKNOWN) for _ in jaxprs.invars(body))
    outputs = _same(len(eqn.outvars))
    return Carried((Entered(("jaxpr", None), body, Role.CALL, inputs, outputs),))


def _not_entered(reason: str, *params: str) -> Callable[[Eqn], Carried]:
    def handler(eqn: Eqn) -> Carried:
        return Carried(not_entered=tuple(NotEntered(p, reason) for p in params if p in eqn.params))

    return handler


_JVP_OPAQUE = NotEntered("jvp_jaxpr_fun", "a derivative rule: built only when grad runs")
_FWD_OPAQUE = NotEntered("fwd_jaxpr_thunk", "a forward rule: built only when grad runs")
_BWD_OPAQUE = NotEntered("bwd", "a backward rule: built only when grad runs")
_PRIMAL_OPAQUE = NotEntered("fun_jaxpr_thunk", "the undifferentiated function, built on demand")
_BATCH_OPAQUE = NotEntered("rule", "a batching rule: built only when vmap runs")

_SOURCE = "jax._src."
_HANDLERS: tuple[tuple[str, str, Callable[[Eqn], Carried]], ...] = (
    ("pjit", "jit_p", _call("jaxpr")),
    ("core", "closed_call_p", _call("call_jaxpr")),
    ("core", "call_p", _call("call_jaxpr")),
    ("ad_checkpoint", "remat_p", _call("jaxpr")),
    ("custom_derivatives", "custom_jvp_call_p", _call("call_jaxpr", _JVP_OPAQUE)),
    ("custom_derivatives", "custom_vjp_call_p", _call("call_jaxpr", _FWD_OPAQUE, _BWD_OPAQUE)),
    ("custom_derivatives", "remat_opt_p", _call("fwd_jaxpr", _PRIMAL_OPAQUE)),
    ("custom_batching", "custom_vmap_p", _call("call", _BATCH_OPAQUE)),
    ("compute_on", "compute_on_p", _call("jaxpr")),
    ("lax.control_flow.loops", "scan_p", _scan),
    ("lax.control_flow.loops", "while_p", _while),
    ("lax.control_flow.conditionals", "cond_p", _cond),
    ("shard_map", "shard_map_p", _shard_map),
    ("pallas.pallas_call", "pallas_call_p", _pallas_call),
    ("pallas.primitives", "run_scoped_p", _run_scoped),
    (
        "pallas.mpmd",
        "mpmd_map_p",
        _not_entered("SparseCore and multi-core kernel bodies are not rewritten", "jaxprs"),
    ),
    (
        "hijax",
        "call_hi_primitive_p",
        _not_entered("a user-defined primitive whose body is a Python method", "_prim", "prim"),
    ),
)

_table: dict[Any, Callable[[Eqn], Carried]] = {}
_waiting: list[tuple[str, str, Callable[[Eqn], Carried]]] = list(_HANDLERS)
_modules_seen = -1


def _handler(primitive: Any) -> Callable[[Eqn], Carried] | None:
    """The handler of a primitive, by object.

    An equation of a primitive can only exist once its module is loaded, so modules such as Pallas
    are never imported for the table's sake.
    """
    global _modules_seen
    if _waiting and len(sys.modules) != _modules_seen:
        _modules_seen = len(sys.modules)
        for entry in list(_waiting):
            name, attribute, handler = entry
            module = sys.modules.get(_SOURCE + name)
            loaded = getattr(module, attribute, None)
            if loaded is not None:
                _table.setdefault(loaded, handler)
                _waiting.remove(entry)
    return _table.get(primitive)
