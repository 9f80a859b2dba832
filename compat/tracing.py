"""Trace functions to jaxprs, evaluate jaxprs, and stand where an equation stands while doing so."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import ad_util, api_util, config, core, pjit
from jax._src import linear_util as lu
from jax._src.interpreters import partial_eval as pe
from jax._src.util import fun_name

from . import jaxprs
from .jaxprs import Atom, Body, Eqn, Jaxpr, Var
from .mesh_types import differs_only_in_mesh
from .outputs import Outputs, passed_on
from .staging import adopted, staged

_HOST_VALUES = (bool, int, float, complex, np.ndarray, np.generic)
Tracer: Any = core.Tracer
JaxprTypeError: Any = core.JaxprTypeError
_JITTED: type = type(jax.jit(lambda: None))


@dataclass(frozen=True)
class Traced:
    """A function traced on flat arguments."""

    closed: Body
    outputs: Outputs
    holds_tracers: bool
    """Whether a constant is another trace's tracer: such a jaxpr must not outlive that trace."""


def is_dynamic(leaf: object) -> bool:
    """Whether an argument leaf is traced; anything else is closed over, as under static args."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) or (
        isinstance(leaf, core.Tracer)
    )


def is_dynamic_under_jit(leaf: object) -> bool:
    """The same inside `jax.jit`, where a numpy scalar that isn't traced was a static argument."""
    return is_dynamic(leaf) and not isinstance(leaf, np.generic)


def type_of(leaf: Any) -> Any:
    """The abstract value a leaf is traced at; a `jax.ShapeDtypeStruct` stands for an array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return core.shaped_abstractify(leaf)
    return core.typeof(leaf)


def trace(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    avals: Sequence[Any],
    is_dynamic: Callable[[object], bool] = is_dynamic,
) -> Traced:
    """Trace ``fn`` once.

    Args:
      fn: the function; ``fn(*args, **kwargs)`` must be valid.
      args: positional arguments, pytrees.
      kwargs: keyword arguments, pytrees.
      avals: the abstract value of every dynamic leaf of ``(args, kwargs)``, in order.
      is_dynamic: which leaves are traced.

    Returns:
      The closed jaxpr on the dynamic leaves.
    """
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    slots = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
    outputs = Outputs(None)

    def flat(*dynamic: Any) -> list[Any]:
        nonlocal outputs
        filled = list(leaves)
        for slot, value in zip(slots, dynamic, strict=True):
            filled[slot] = value
        inner_args, inner_kwargs = jax.tree.unflatten(in_tree, filled)
        outs, tree = jax.tree.flatten(fn(*inner_args, **inner_kwargs))
        outputs = Outputs(tree, passed_on(fn, outs, tree, leaves))
        kept = dict(outputs.passed_on)
        return [out for i, out in enumerate(outs) if i not in kept]

    debug = api_util.debug_info("relower.optimize", fn, args, kwargs)
    debug = debug._replace(arg_names=None) if hasattr(debug, "_replace") else debug
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(lu.wrap_init(flat, debug_info=debug), list(avals))
    return Traced(close(jaxpr, consts), outputs, any(isinstance(c, core.Tracer) for c in consts))


def close(jaxpr: Any, consts: Sequence[Any]) -> Body:
    """A jaxpr with the values of its constants."""
    closed = getattr(core, "ClosedJaxpr", None)
    return closed(jaxpr, consts) if closed is not None else jaxpr.with_consts(consts)


def is_staging() -> bool:
    """Whether the caller is being traced to a jaxpr, rather than differentiated or run."""
    return isinstance(core.trace_ctx.trace, pe.DynamicJaxprTrace)


def evaluate(closed: Body, *args: Any, once: bool = False) -> list[Any]:
    """Evaluate a closed jaxpr under the caller's trace, keeping names, lines and contexts.

    Args:
      closed: the jaxpr.
      *args: one value for each of its inputs.
      once: nobody evaluates this jaxpr again, so that its equations may become the caller's.
    """
    if is_staging() and not _is_high(closed):
        current = core.trace_ctx.trace
        # Under ``auto_dce`` an equation lives by what reads it, which one of a jaxpr doesn't tell.
        own = once and not current.frame.auto_dce
        return (adopted if own else staged)(current, closed, args)
    results = core.jaxpr_as_fun(closed)(*args)
    # A result that is a literal of the jaxpr is of a type of jax's own; callers expect arrays.
    return [jnp.asarray(r) if isinstance(r, _HOST_VALUES) else r for r in results]


def _is_high(closed: Body) -> bool:
    """Whether a primitive needs jax's lowering of high-level types, which binding it does."""
    return bool(jaxprs.opened(closed).is_high)


def name_of(fn: Callable[..., Any]) -> str:
    """The name that jax gives a function where it jits it, and so its module.

    Of a `functools.partial`, that of the function inside; an object that is called has none.
    """
    return str(fun_name(fn))


def trace_context() -> Any:
    """Hashable: everything outside the arguments that a trace may depend on."""
    axis_env = core.get_axis_env()
    names = tuple(sorted((str(k), v) for k, v in axis_env.axis_sizes.items()))
    return config.trace_context(), names


def named_axes() -> tuple[str, ...]:
    """The names of the axes that a collective could name here."""
    return tuple(str(name) for name in core.get_axis_env().axis_sizes)


def trace_replacement(
    fn: Callable[..., Sequence[Any]], operands: Sequence[Atom], site: Eqn
) -> Jaxpr:
    """Trace a replacement as if it were written where ``site`` stands.

    Args:
      fn: takes one array per operand, returns a sequence of arrays. Constants must be scalars.
      operands: variables or literals that are in scope at ``site``; their types are what counts.
      site: the equation replaced; its context is taken over.
    """

    # Literals are traced like variables: as Python numbers they would follow Python's arithmetic.
    def as_list(*values: Any) -> list[Any]:
        return list(fn(*values))

    debug = api_util.debug_info("relower replacement", fn, (), {})
    debug = debug._replace(arg_names=None)
    with site.ctx.manager, _wide_types(site):
        jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(
            lu.wrap_init(as_list, debug_info=debug), [a.aval for a in operands]
        )
    if consts:
        raise ValueError(
            f"a replacement closed over {len(consts)} array constant(s) of shape "
            f"{[np.shape(c) for c in consts]}; wanted none: build them from iota or scalars"
        )
    return jaxpr


def splice(
    jaxpr: Jaxpr, operands: Sequence[Atom], site: Eqn, result_names: Sequence[Var] = ()
) -> tuple[list[Eqn], list[Atom]]:
    """The equations of a traced replacement on operands of a site, all results named anew.

    Args:
      jaxpr: from `trace_replacement`; it may be used at many sites.
      operands: variables or literals that are in scope at ``site``.
      site: the equation replaced; its name stack and source line are taken over.
      result_names: variables of the site. A result that is made here takes over the one at its
        position if that is of its type, so that its readers keep their equations.

    Returns:
      The new equations, and the atoms holding the results.
    """
    mapping: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    where, literal = site.source_info, jaxprs.LITERAL
    for name, atom in zip(result_names, jaxpr.outvars, strict=False):
        if type(atom) is literal or atom in mapping or jaxprs.is_dropped(name):
            continue
        if atom.aval == name.aval or differs_only_in_mesh(atom.aval, name.aval):
            mapping[atom] = name
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        outvars = []
        for var in eqn.outvars:
            if not jaxprs.is_dropped(var):
                found = mapping.get(var)
                if found is None:
                    found = mapping[var] = jaxprs.new_var(var.aval)
                var = found
            outvars.append(var)
        eqns.append(
            eqn.replace(
                invars=[a if type(a) is literal else mapping[a] for a in eqn.invars],
                outvars=outvars,
                effects=jaxprs.renamed_effects(eqn.effects, mapping),
                source_info=where,
            )
        )
    return eqns, [a if type(a) is literal else mapping[a] for a in jaxpr.outvars]


def inline(
    fn: Callable[..., Sequence[Any]], operands: Sequence[Atom], site: Eqn
) -> tuple[list[Eqn], list[Atom]]:
    """`trace_replacement` and `splice` in one, of a function that is needed once."""
    return splice(trace_replacement(fn, operands, site), operands, site)


def zeros(aval: Any) -> Any:
    """Zeros of a type, laid out over the mesh and varying over its axes as the type says."""
    return ad_util.zeros_like_aval(aval)


def rebind(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation's primitive, with its params, on other operands."""
    results = eqn.primitive.bind(*operands, **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate_alone(
    eqns: Sequence[Eqn], inputs: Sequence[Var], outputs: Sequence[Atom], values: Sequence[Any]
) -> list[Any]:
    """The outputs of equations that were cut out of their body, under the caller's mesh.

    Each equation's own mesh is left aside: it is that of the program which they were cut from.
    """
    env: dict[Var, Any] = dict(zip(inputs, values, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if jaxprs.is_literal(atom) else env[atom]

    for eqn in eqns:
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*map(read, eqn.invars), **params)
        results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in outputs]


def runs_elsewhere(eqn: Eqn) -> str | None:
    """What an equation's context says of how to compile it, beside its mesh; None for nothing."""
    for name in ("compute_type", "xla_metadata"):
        value = getattr(eqn.ctx, name, None)
        if value:
            return f"{name}={value}"
    return None


def run_equation(eqn: Eqn, slots: Sequence[int], operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, derivative rules included, with some operands given.

    Args:
      eqn: any equation; its own operands are otherwise literals.
      slots: the positions of the operands given.
      operands: as many arrays, of the operands' types.
    """
    invars = [core.Var(eqn.invars[i].aval) for i in slots]
    inside = list(eqn.invars)
    for slot, var in zip(slots, invars, strict=True):
        inside[slot] = var
    made = eqn.replace(invars=inside)
    debug = api_util.debug_info("relower equation", run_equation, (), {})._replace(
        arg_names=None, result_paths=()
    )
    outvars = [core.Var(v.aval) if jaxprs.is_dropped(v) else v for v in eqn.outvars]
    made = made.replace(outvars=outvars)
    body = core.Jaxpr((), invars, outvars, [made], made.effects, debug_info=debug)
    return list(core.jaxpr_as_fun(close(body, ()))(*operands))


def call_again(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation on other operands; with its own derivative, where it has one."""
    fresh = [jaxprs.new_var(a.aval) for a in eqn.invars]
    results = [jaxprs.new_var(v.aval) for v in eqn.outvars]
    debug = api_util.debug_info("relower", call_again, (), {})._replace(
        arg_names=None, result_paths=()
    )
    alone = core.Jaxpr(
        (), fresh, results, [eqn.replace(invars=fresh, outvars=results)], eqn.effects,
        debug_info=debug,
    )  # fmt: skip
    return evaluate(close(alone, ()), *operands)


def _wide_types(site: Eqn) -> contextlib.AbstractContextManager[Any]:
    """64-bit types where the site has them, as within a local ``jax.enable_x64()``.

    An equation's context says nothing of it.
    """
    dtypes = (getattr(a.aval, "dtype", None) for a in (*site.invars, *site.outvars))
    wide = any(d in _WIDE for d in dtypes)
    return config.enable_x64(True) if wide else contextlib.nullcontext()


_WIDE = frozenset(np.dtype(n) for n in ("int64", "uint64", "float64", "complex128"))


@contextlib.contextmanager
def inside(eqn: Eqn) -> Iterator[None]:
    """The context in which the bodies of ``eqn`` were traced: axis names, vma checking, grid."""
    from . import bodies

    params = eqn.params
    with contextlib.ExitStack() as stack:
        stack.enter_context(eqn.ctx.manager)
        if eqn.primitive is bodies.shard_map_primitive():
            from jax._src import shard_map as sm
            from jax._src.mesh import use_abstract_mesh

            mesh, manual = params["mesh"], params["newly_manual_axes"]
            stack.enter_context(sm._extend_axis_env(mesh, manual))
            stack.enter_context(use_abstract_mesh(sm._as_manual_mesh(mesh, manual)))
            stack.enter_context(config._check_vma(params["check_vma"]))
        elif _is_pallas_call(eqn):
            from jax._src.pallas import core as pallas_core

            mapping = params["grid_mapping"]
            stack.enter_context(pallas_core.tracing_grid_env(mapping.grid, mapping.vmapped_dims))
        yield


def is_place(eqn: Eqn) -> bool:
    """Whether a trace inside an equation's bodies depends on more of it than its ``ctx``."""
    from . import bodies

    return eqn.primitive is bodies.shard_map_primitive() or _is_pallas_call(eqn)


def pallas_call() -> Any | None:
    """The primitive of Pallas calls; None where nobody has loaded Pallas, so that there is none."""
    module = sys.modules.get("jax._src.pallas.pallas_call")
    return None if module is None else module.pallas_call_p


def _is_pallas_call(eqn: Eqn) -> bool:
    return eqn.primitive is pallas_call()


def check_equations(eqns: Sequence[Eqn]) -> None:
    """Re-derive the types and effects of some equations of one body by jax's own rules.

    Operands not defined among them are taken at their stated types.

    Raises:
      JaxprTypeError: a rule disagrees with what an equation states.
    """
    if not eqns:
        return
    defined: set[Var] = set()
    free: dict[Var, None] = {}
    effects: set[Any] = set()
    for eqn in eqns:
        for atom in eqn.invars:
            if not jaxprs.is_literal(atom) and atom not in defined:
                free[atom] = None
        defined.update(eqn.outvars)
        effects |= eqn.effects
    debug = api_util.debug_info("relower check", check_equations, (), {})._replace(
        arg_names=None, result_paths=()
    )
    core.check_jaxpr(
        core.Jaxpr((), list(free), [], list(eqns), frozenset(effects), debug_info=debug)
    )


def rejit(jitted: Any, transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """``jit(transform(f), **same options)`` for a ``jitted`` made by ``jit(f, **options)``."""
    return pjit._cpp_pjit(transform(jitted._fun), jitted._jit_info)


def is_jitted(fn: object) -> bool:
    """Whether ``fn`` is what `jax.jit` returns.

    By type: `functools.wraps` copies jit's attributes to functions that do more than it.
    """
    return isinstance(fn, _JITTED) and hasattr(fn, "_jit_info") and hasattr(fn, "_fun")


def trace_jitted(jitted: Any, args: Any, kwargs: Any) -> tuple[Body, Any, Callable[[object], bool]]:
    """The function inside ``jitted``, traced as jit traces it.

    Python numbers are arrays of unknown value there unless they are static arguments.

    Returns:
      The closed jaxpr, the structure of the output, and which argument leaves are traced as far as
      a leaf alone tells: of a static argument it doesn't.
    """
    traced = jitted.trace(*args, **kwargs)
    return traced.jaxpr, traced.out_tree, lambda leaf: True


@functools.cache
def primitive(path: str) -> Any:
    """The primitive object at a dotted path below ``jax._src``, as in ``lax.lax.sort_p``."""
    import importlib

    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module("jax._src." + module), attribute)
