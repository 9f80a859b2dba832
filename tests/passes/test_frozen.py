"""Declaring what is frozen: every way to say it, and one clear error for every wrong one."""

import re

import jax
import jax.numpy as jnp
import pytest

import relower
from relower import Frozen, explain, optimize
from relower.passes.frozen import argument_paths, paths

P = {"router": {"kernel": jnp.ones((3, 4))}, "wo": [jnp.ones((4, 3)), jnp.ones((3, 2))]}
X = jnp.ones((2, 3))
NAMES = ["router/kernel", "wo/0", "wo/1"]


def loss(p, x):
    return jnp.sum(((x @ p["router"]["kernel"]) @ p["wo"][0]) @ p["wo"][1])


GRADS = jax.grad(loss)
BOTH = jax.value_and_grad(loss)
MASK = {"router": {"kernel": True}, "wo": [False, True]}


def dropped(fn, frozen):
    leaves = explain(fn, P, X, passes=["frozen_gradient"], frozen=frozen).frozen
    assert all(leaf.way == "declared" and leaf.status.value == "applied" for leaf in leaves)
    return sorted(leaf.path for leaf in leaves)


@pytest.mark.parametrize(("fn", "frozen", "wanted"), [
    (GRADS, "router/kernel", NAMES[:1]),
    (GRADS, r"^wo/\d$", NAMES[1:]),
    (GRADS, lambda path: path.endswith("1"), NAMES[2:]),
    (GRADS, MASK, [NAMES[0], NAMES[2]]),
    (GRADS, Frozen(MASK), [NAMES[0], NAMES[2]]),
    (BOTH, Frozen(MASK, grads=lambda out: out[1]), [NAMES[0], NAMES[2]]),
    (BOTH, Frozen("kernel", grads=lambda out: out[1]["router"]), ["kernel"]),
    (BOTH, "router", ["1/router/kernel"]),
])  # fmt: skip
def test_ways_to_declare(fn, frozen, wanted):
    assert dropped(fn, frozen) == wanted


@pytest.mark.parametrize(
    ("prefix", "wanted"),
    [
        ({"router": True, "wo": False}, ["router/kernel"]),
        ({"router": False, "wo": [True, False]}, ["wo/0"]),
        ({"router": {"kernel": True}, "wo": True}, ["router/kernel", "wo/0", "wo/1"]),
        (Frozen(True), ["router/kernel", "wo/0", "wo/1"]),
    ],
)
def test_a_bool_stands_for_all_leaves_of_a_subtree(prefix, wanted):
    """As of ``in_axes``, and so the zeros that come out."""
    assert dropped(GRADS, prefix) == wanted
    grads = optimize(GRADS, frozen=prefix)(P, X)
    paths, _ = jax.tree_util.tree_flatten_with_path(grads)
    zero = [jax.tree_util.keystr(p, simple=True, separator="/") for p, g in paths if not g.any()]
    assert zero == wanted


def test_under_jit_and_as_a_decorator():
    declared = optimize(jax.jit(BOTH), frozen=Frozen("router", grads=lambda out: out[1]))
    _, grads = declared(P, X)
    assert not grads["router"]["kernel"].any()
    assert grads["wo"][0].any()
    assert dropped(jax.jit(GRADS), "router") == NAMES[:1]

    @optimize(frozen="wo")
    def step(p, x):
        return GRADS(p, x)

    assert not step(P, X)["wo"][0].any()


def test_a_mask_of_nothing_changes_nothing():
    mask = jax.tree.map(lambda _: False, P)
    assert not explain(GRADS, P, X, passes=["frozen_gradient"], frozen=mask).sites


BAD_DECLARATIONS = {
    "an unfinished regex": ("(", ValueError, "the regex '(' can't be compiled: missing )"),
    "no argument": (lambda: True, TypeError, "parameters (); wanted one that takes a leaf's path"),
    "two arguments": (lambda a, b: True, TypeError, "parameters (a, b)"),
    "a tree of numbers": ({"router": 1}, TypeError, "found 1 of type int in a tree of bools"),
    "a number": (3, TypeError, "wanted a regex, a function of a path, or a tree"),
}


@pytest.mark.parametrize("name", BAD_DECLARATIONS)
def test_declarations_that_are_none(name):
    frozen, kind, message = BAD_DECLARATIONS[name]
    for declare in (Frozen, lambda frozen: optimize(GRADS, frozen=frozen)):
        with pytest.raises(kind, match=re.escape(message)):
            declare(frozen)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_lone_bool_names_no_leaf(frozen):
    for use in (lambda: optimize(GRADS, frozen=frozen), lambda: dropped(GRADS, frozen)):
        with pytest.raises(TypeError, match=f"found {frozen}, which names no leaf; wanted a regex"):
            use()
    one = explain(jax.grad(lambda w: jnp.sum(X @ w)), P["router"]["kernel"], frozen=Frozen(frozen))
    assert len(one.frozen) == frozen


def broken(out):
    return out["grads"]


MISFITS = {
    "no leaf": ("nope", ValueError, "matches none of 3 leaves: router/kernel, wo/0, wo/1"),
    "no leaf for the function": (lambda path: False, ValueError, "the function matches none of 3"),
    "no bool": (lambda path: 1, TypeError, "returned 1 of type int for 'router/kernel'"),
    "another tree": (
        {"router": True}, ValueError, "the tree of bools has the structure {'router': *}; wanted",
    ),
    "no prefix": (
        {"router": {"kernel": {"deep": True}}, "wo": True}, ValueError, "or a prefix of it, {'rou",
    ),
    "a list for a tuple": (
        {"router": True, "wo": (True, True)}, ValueError, "wanted that of the gradients, or a",
    ),
    "no such part": (Frozen("wo", grads=broken), ValueError, "KeyError: 'grads'"),
    "no part": (Frozen("wo", grads=lambda out: 7), ValueError, "of other things than leaves"),
    "a number": (Frozen("wo", grads=lambda out: {"wo": 1}), ValueError, "things than leaves of"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_declarations_that_dont_fit(name):
    frozen, kind, message = MISFITS[name]
    for use in (lambda: optimize(GRADS, frozen=frozen)(P, X), lambda: dropped(GRADS, frozen)):
        with pytest.raises(kind, match=re.escape(message)) as caught:
            use()
        assert "\n" not in str(caught.value).split("\n---")[0]


def test_grads_must_be_a_function():
    with pytest.raises(TypeError, match=r"grads is 1; wanted a function of the output"):
        Frozen("wo", grads=1)


@pytest.mark.parametrize("told", [{"frozen": "wo"}, {"assume": "finite_grads"}])
def test_what_is_said_of_a_pass_that_is_not_run(told):
    (name,) = told
    with pytest.raises(ValueError, match=f"{name} is for the pass frozen_gradient: found"):
        optimize(GRADS, passes=["affine_gather"], **told)
    with pytest.raises(ValueError, match=f"{name} is for the pass frozen_gradient: found"):
        explain(GRADS, P, X, disable=["frozen_gradient"], **told)


def test_unknown_assumptions():
    with pytest.raises(ValueError, match="assume: found 'finite'; wanted one of 'finite_grads'"):
        optimize(GRADS, assume="finite")


def test_paths():
    assert paths(P) == NAMES
    always = lambda leaf: True
    fn = lambda params, x, *rest, scale: None
    found = argument_paths(fn, (P, X, {"a": 1}), {"scale": 2}, always)
    assert found == [*(f"params/{n}" for n in NAMES), "x", "[2]/a", "scale"]


def test_the_public_name():
    assert relower.Frozen is Frozen


def test_a_trained_parameter_whose_gradient_isnt_used_is_not_called_frozen():
    """Where only the loss is returned, nothing says which parameters are trained."""
    report = explain(lambda p, x: BOTH(p, x)[0], P, X, passes=["frozen_gradient"])
    assert len(report.frozen) == 3
    lines = [line for line in str(report).splitlines() if "FLOPs" in line]
    assert sum("nothing needs its gradient, saves" in line for line in lines) == 3
    assert "recognised" not in str(report)
