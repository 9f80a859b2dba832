"""Change how many operands and results a body-carrying equation has.

Each supported primitive says which params go with its operands and results; for others the edit
is refused with `CannotEdit`, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import bodies, jaxprs, tracing
from .bodies import BodyKey, Entered, Flow
from .jaxprs import Atom, Body, Eqn, Var


class CannotEdit(Exception):
    """The equation's operands or results can't be changed; the message says why."""


Narrow = Callable[[Body, frozenset[int]], Body]

_PER_OPERAND = ("in_shardings", "in_layouts", "donated_invars", "in_specs", "prevent_cse")
"""Params that hold one entry per operand; remat's ``prevent_cse`` may also be one bool for all."""


def _is(eqn: Eqn, *paths: str) -> bool:
    return any(eqn.primitive is tracing.primitive(p) for p in paths)


def _is_plain_call(eqn: Eqn) -> bool:
    return _is(eqn, "pjit.jit_p", "core.closed_call_p", "ad_checkpoint.remat_p")


def _is_scan(eqn: Eqn) -> bool:
    return _is(eqn, "lax.control_flow.loops.scan_p")


def drop_unread(eqn: Eqn, unread: Mapping[BodyKey, frozenset[int]], narrow: Narrow) -> Eqn:
    """``eqn`` without the operands that no body of it reads any more.

    Args:
      eqn: an equation whose bodies have been rewritten.
      unread: for each body, the inputs that the rewrite left unread.
      narrow: returns a body without some inputs; called once per body, so that sharing survives.

    Operands of a loop's carry, of effects and of primitives without a rule stay as they are.
    """
    if not any(unread.values()) or not can_narrow(eqn):
        return eqn
    entered = bodies.carried(eqn).entered
    dropped = _droppable(entered, unread)
    if not dropped:
        return eqn
    params = dict(eqn.params)
    for name in _PER_OPERAND:
        if isinstance(params.get(name), tuple):
            params[name] = tuple(p for i, p in enumerate(params[name]) if i not in dropped)
    _count_operands(eqn, params, dropped)
    new = eqn.replace(
        params=params, invars=[a for i, a in enumerate(eqn.invars) if i not in dropped]
    )
    narrowed: dict[BodyKey, Body] = {}
    for e in entered:
        inputs = frozenset(i for i, p in enumerate(e.inputs) if p.outer in dropped)
        narrowed[e.key] = narrow(e.body, inputs) if inputs else e.body
    return bodies.with_bodies(new, narrowed)


_PER_RESULT = ("out_shardings", "out_layouts", "out_specs")
"""Params that hold one entry per result."""


def can_narrow(eqn: Eqn) -> bool:
    """Whether `narrowed` has a rule for an equation that carries bodies."""
    return (
        _is_plain_call(eqn)
        or _is_scan(eqn)
        or _is(eqn, "lax.control_flow.conditionals.cond_p", "lax.control_flow.loops.while_p")
        or eqn.primitive is bodies.shard_map_primitive()
    )


def narrowed(
    eqn: Eqn,
    operands: Sequence[bool],
    results: Sequence[bool],
    narrower: Mapping[BodyKey, Body],
) -> Eqn:
    """``eqn`` with only some of its operands and results, around bodies that fit them.

    A loop's carried value goes as a whole: its operand and its result, or neither.

    Args:
      eqn: an equation that `can_narrow`.
      operands: which operands to keep, one bool each.
      results: which results to keep, one bool each.
      narrower: a body without the inputs and outputs that go, for each body of the equation.
    """
    params = dict(eqn.params)
    dropped = frozenset(i for i, kept in enumerate(operands) if not kept)
    for names, kept in ((_PER_OPERAND, operands), (_PER_RESULT, results)):
        for name in names:
            if isinstance(params.get(name), tuple):
                params[name] = tuple(p for p, keep in zip(params[name], kept, strict=True) if keep)
    if _is_scan(eqn) and "num_carry" in params:
        params["num_carry"] -= sum(not keep for keep in results[: params["num_carry"]])
    if "ft_out" in params:
        params["ft_out"] = params["ft_out"].filter_with_mask(list(results))
    _count_operands(eqn, params, dropped)
    new = eqn.replace(
        params=params,
        invars=[a for a, keep in zip(eqn.invars, operands, strict=True) if keep],
        outvars=[v for v, keep in zip(eqn.outvars, results, strict=True) if keep],
    )
    return bodies.with_bodies(new, narrower)


def _droppable(
    entered: Sequence[Entered], unread: Mapping[BodyKey, frozenset[int]]
) -> frozenset[int]:
    """Operands newly unread in one body at least, and read in none."""
    wanted: set[int] = set()
    blocked: set[int] = set()
    for e in entered:
        jaxpr = jaxprs.opened(e.body)
        read: set[Var] = {a for a in jaxpr.outvars if not jaxprs.is_literal(a)}
        for eqn in jaxpr.eqns:
            read.update(a for a in eqn.invars if not jaxprs.is_literal(a))
        for position, (port, var) in enumerate(zip(e.inputs, jaxprs.invars(e.body), strict=True)):
            if port.outer is None:
                continue
            if port.flow is Flow.CARRY or var in read:
                blocked.add(port.outer)
            elif position in unread.get(e.key, frozenset()):
                wanted.add(port.outer)
    return frozenset(wanted - blocked)


def _count_operands(eqn: Eqn, params: dict[str, Any], dropped: frozenset[int]) -> None:
    if _is_scan(eqn):
        if "ft_in" in params:
            params["ft_in"] = params["ft_in"].filter_with_mask(
                [i not in dropped for i in range(len(eqn.invars))]
            )
        else:
            params["num_consts"] -= sum(i < params["num_consts"] for i in dropped)
    elif "cond_nconsts" in params:
        nc, nb = params["cond_nconsts"], params["body_nconsts"]
        params["cond_nconsts"] -= sum(i < nc for i in dropped)
        params["body_nconsts"] -= sum(nc <= i < nc + nb for i in dropped)


def add_output(eqn: Eqn, key: BodyKey, inner: Atom) -> tuple[Eqn, Var]:
    """``eqn`` with one more result: a value computed in its body.

    A call returns the value itself, a scan the values of all iterations stacked on axis 0, a
    shard_map the devices' values side by side on axis 0.

    Returns:
      The new equation, and the variable bound to the result.

    Raises:
      CannotEdit: the primitive has no rule, or would change what is saved or run.
    """
    body = next(e.body for e in bodies.carried(eqn).entered if e.key == key)
    params = dict(eqn.params)
    aval = inner.aval
    if _is(eqn, "ad_checkpoint.remat_p") and params["policy"] is not None:
        raise CannotEdit("a remat policy decides what is saved: an added output would be saved")
    if _is(eqn, "pjit.jit_p"):
        params["out_shardings"] = (*params["out_shardings"], _unspecified())
        params["out_layouts"] = (*params["out_layouts"], None)
    elif _is_scan(eqn):
        aval = _stacked(aval, params["length"])
        if "ft_out" in params:
            carry, ys = params["ft_out"].unpack()
            params["ft_out"] = _pack((carry, (ys, _nones(1))))
    elif eqn.primitive is bodies.shard_map_primitive():
        spec = _shard_spec(eqn, aval)
        params["out_specs"] = (*params["out_specs"], spec)
        aval = unsharded_type(eqn, spec, aval)
    elif not _is_plain_call(eqn):
        raise CannotEdit(f"no rule adds an output to {eqn.primitive.name}")
    outvars = [*jaxprs.opened(body).outvars, inner]
    params[key[0]] = jaxprs.rebuild(body, outvars=outvars)
    result = jaxprs.new_var(aval)
    return eqn.replace(params=params, outvars=[*eqn.outvars, result]), result


def add_input(eqn: Eqn, key: BodyKey, outer: Atom, *, sliced: bool) -> tuple[Eqn, Var]:
    """``eqn`` with one more operand, and the variable that its body receives it in.

    Args:
      eqn: the equation.
      key: which body.
      outer: a value in scope at the equation.
      sliced: for a scan, give each iteration its slice along axis 0; otherwise the whole value.

    Raises:
      CannotEdit: the primitive has no rule.
    """
    body = next(e.body for e in bodies.carried(eqn).entered if e.key == key)
    params = dict(eqn.params)
    aval = outer.aval
    position = len(eqn.invars)
    if _is(eqn, "pjit.jit_p"):
        params["in_shardings"] = (*params["in_shardings"], _unspecified())
        params["in_layouts"] = (*params["in_layouts"], None)
        params["donated_invars"] = (*params["donated_invars"], False)
    elif _is_scan(eqn):
        aval, position = _add_scan_input(eqn, params, aval, sliced)
    elif eqn.primitive is bodies.shard_map_primitive():
        spec = _side_by_side(eqn) if sliced else _replicated()
        params["in_specs"] = (*params["in_specs"], spec)
        aval = sharded_type(eqn, spec, aval)
    elif isinstance(params.get("prevent_cse"), tuple):
        params["prevent_cse"] = (*params["prevent_cse"], True)
    elif not _is_plain_call(eqn):
        raise CannotEdit(f"no rule adds an operand to {eqn.primitive.name}")
    var = jaxprs.new_var(aval)
    inner = list(jaxprs.invars(body))
    inner.insert(position, var)
    operands = list(eqn.invars)
    operands.insert(position, outer)
    params[key[0]] = jaxprs.rebuild(body, invars=inner)
    return eqn.replace(params=params, invars=operands), var


def _add_scan_input(eqn: Eqn, params: dict[str, Any], aval: Any, sliced: bool) -> tuple[Any, int]:
    num_consts = bodies.scan_counts(eqn)[0]
    if sliced and (not aval.shape or aval.shape[0] != params["length"]):
        raise CannotEdit(
            f"a scan of length {params['length']} can't slice a value of shape {aval.shape}"
        )
    if "ft_in" in params:
        consts, carry, xs = params["ft_in"].unpack()
        grown = (consts, carry, (xs, _nones(1))) if sliced else ((consts, _nones(1)), carry, xs)
        params["ft_in"] = _pack(grown)
    elif not sliced:
        params["num_consts"] += 1
    if not sliced:
        return aval, num_consts
    spec = aval.sharding.spec
    sharding = (
        aval.sharding.update(spec=spec.update(partitions=tuple(spec)[1:]))
        if len(tuple(spec))
        else aval.sharding
    )
    return aval.update(shape=aval.shape[1:], sharding=sharding), len(eqn.invars)


def _stacked(aval: Any, length: int) -> Any:
    spec = aval.sharding.spec
    sharding = aval.sharding.update(spec=spec.update(partitions=(None, *tuple(spec))))
    return aval.update(shape=(length, *aval.shape), sharding=sharding, weak_type=False)


def _shard_spec(eqn: Eqn, aval: Any) -> Any:
    from .vma import varying

    if eqn.params["check_vma"] and not varying(aval) & eqn.params["newly_manual_axes"]:
        return _replicated()
    if not aval.shape:
        raise CannotEdit("a scalar that differs between devices has no axis to leave shard_map by")
    return _side_by_side(eqn)


def _side_by_side(eqn: Eqn) -> Any:
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    import jax

    return jax.sharding.PartitionSpec(tuple(a for a in mesh.axis_names if a in manual))


def _replicated() -> Any:
    import jax

    return jax.sharding.PartitionSpec()


def sharded_type(eqn: Eqn, spec: Any, aval: Any) -> Any:
    """The type of one device's part of an operand of a shard_map."""
    from jax._src import shard_map as sm

    p = eqn.params
    return sm.shard_aval(p["mesh"], p["newly_manual_axes"], p["check_vma"], spec, aval)


def unsharded_type(eqn: Eqn, spec: Any, aval: Any) -> Any:
    """The type that a shard_map gives to a result with parts of type ``aval``."""
    from jax._src import shard_map as sm

    p = eqn.params
    return sm.unshard_aval(p["mesh"], p["check_vma"], spec, aval)


def _unspecified() -> Any:
    from jax._src.sharding_impls import UNSPECIFIED

    return UNSPECIFIED


def _nones(n: int) -> Any:
    from jax._src import flattree

    return flattree.nones(n)


def _pack(tree: Any) -> Any:
    from jax._src import flattree

    return flattree.pack(tree)
