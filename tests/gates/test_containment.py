import pytest

from relower.gates.containment import checked, components, in_scope, outside
from relower.lowering.change import Change, Difference, Group, Verdict
from relower.lowering.errors import InputError
from relower.lowering.program import Location


@pytest.mark.parametrize(
    ("scope", "pattern", "inside"),
    [
        ("jit(step)/router/sort", "router", True),
        ("jit(step)/router/sort", "rout", False),
        ("jit(step)/router/sort", "rout*", True),
        ("jit(step)/router/sort", "router/sort", True),
        ("jit(step)/router/sort", "step/router", True),
        ("jit(step)/router/x/sort", "router/sort", False),
        ("jit(step)/transpose(jvp(router))/sort", "router", True),
        ("jit(step)/transpose(jvp(router))/sort", "jvp(router)", True),
        ("jit(step)/my_router/sort", "router", False),
        ("", "router", False),
    ],
)
def test_in_scope(scope, pattern, inside):
    assert in_scope(scope, pattern) is inside


def test_components_keep_parentheses_together():
    assert components("a/f(b/c)/d") == ["a", "f(b/c)", "d"]


def _difference(*changes):
    groups = tuple(Group((c,)) for c in changes)
    return Difference(Verdict.DIFFERENT, "exact", ("a", "b"), groups=groups)


def _change(*scopes, kind="function", section="main"):
    places = tuple(None if s is None else Location("m.py", 1, s) for s in scopes)
    return Change("operation", "a.b", "", "a", "b", section, kind, places=places)


def test_every_place_counts():
    inside, half = _change("jit(f)/router/x"), _change("jit(f)/router/x", "jit(f)/loss")
    assert outside(_difference(inside), ["scope:router"]) == ()
    assert outside(_difference(inside, half), ["scope:router"]) == (half,)
    assert outside(_difference(inside, half), ["scope:router", "scope:loss"]) == ()


@pytest.mark.parametrize("pattern", ["scope:*", "scope:**", "scope:*/*", "scope:?*"])
def test_a_pattern_for_any_scope_says_nothing(pattern):
    with pytest.raises(InputError, match=r"only-in: .* takes in any scope.*'scope:router'"):
        checked([pattern], "only-in")
    assert checked(["scope:r*", "scope:*/router", "kernel:*"], "only-in")


def test_what_has_no_scope_is_outside():
    for change in (_change(None), _change(), _change("jit(f)/router/x", None)):
        assert outside(_difference(change), ["scope:router"]) == (change,)


def test_kernels_by_name_or_by_where_they_are_called():
    kernel = _change("jit(f)/experts/call", kind="kernel", section="gmm")
    assert outside(_difference(kernel), ["kernel:gmm"]) == ()
    assert outside(_difference(kernel), ["kernel:g*"]) == ()
    assert outside(_difference(kernel), ["scope:experts"]) == ()
    assert outside(_difference(kernel), ["kernel:flash", "scope:router"]) == (kernel,)
    # a function that is called like the kernel isn't the kernel
    function = _change("jit(f)/x", section="gmm")
    assert outside(_difference(function), ["kernel:gmm"]) == (function,)
