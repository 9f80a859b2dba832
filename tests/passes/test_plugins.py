"""Passes of other packages and of the caller: listed, asked for by name, never run unasked."""

import dataclasses
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import relower
from relower import PassNotApplicable, assert_applied, explain, optimize
from relower.lowering.change import Verdict
from relower.passes import Match, Replacement, reach, registry
from relower.passes.guarded import PassFault
from relower.passes.plugins import PluginError, offered

MODULE = '''
"""double_reverse: what is reversed twice stays as it is."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import rev_p

from relower.passes import (
    Bind, Contract, Example, Match, Op, Pass, Reason, Replacement, Requirement,
    reach,
)

TWICE = Op(rev_p, (Op(rev_p, (Bind("x"),), capture={"dimensions": "inner"}),),
           capture={"dimensions": "outer"})


def find(scope, index):
    captures = {}
    if TWICE.match_equation(scope, index, captures) is not None:
        return None  # reversed once: no near miss of this
    return Match(scope, index, captures)


def same_axes(match):
    inner, outer = match.captures["inner"], match.captures["outer"]
    if set(inner) == set(outer):
        return None
    return Reason("other-axes", "the axes differ", str(inner), str(outer))


def replace(match):
    x, results = match.captures["x"], tuple(match.eqn.outvars)
    here = reach(match.scope, x)
    if here is None:
        return Replacement((), results, None, (), wants=x)
    return Replacement((here,), results, None, ())


def before(x):
    return 2 * lax.rev(lax.rev(x, (0,)), (0,))


def after(x):
    return 2 * x


PASS = Pass(
    name="double_reverse",
    contract=Contract.BITWISE,
    summary="rev(rev(x)) → x",
    measure="reversals",
    roots=lambda: frozenset({rev_p}),
    find=find,
    requirements=(Requirement("other-axes", "Both reverse the same axes.", same_axes),),
    profitable=lambda match: None,
    replace=replace,
    before=before,
    after=after,
    examples=lambda: (Example((jax.ShapeDtypeStruct((8, 4), jnp.float32),), "rows"),),
)
NOT_A_PASS = 7
'''


def install(folder, entries, name="guest-passes", module=MODULE):
    """A package as `pip` would leave it: one module, and the entry points it declares."""
    (folder / "guest_passes.py").write_text(module)
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "".join(f"{n} = {v}\n" for n, v in entries.items())
    (info / "entry_points.txt").write_text(f"[relower.passes]\n{lines}")
    return folder


@pytest.fixture(autouse=True)
def _forgetful():
    registry.plugins.cache_clear()
    yield
    registry.plugins.cache_clear()
    sys.modules.pop("guest_passes", None)


@pytest.fixture
def guest(tmp_path, monkeypatch):
    """The package, on this process's path and its children's."""
    monkeypatch.syspath_prepend(install(tmp_path, {"double_reverse": "guest_passes:PASS"}))
    return tmp_path


def twice(x):
    return 2 * lax.rev(lax.rev(x, (0,)), (0,)) + jnp.argsort(jnp.arange(8))[:, None]


X = jnp.arange(32.0).reshape(8, 4)


def test_a_guest_runs_where_it_is_asked_for_and_nowhere_else(guest, equal_bits):
    assert "guest_passes" not in sys.modules
    assert "double_reverse" not in explain(twice, X).passes
    assert "guest_passes" not in sys.modules  # to be installed changes nothing
    assert explain(twice, X, passes=["double_reverse"]).counts() == {"double_reverse": 1}
    done = optimize(twice, passes=["double_reverse"])
    equal_bits(done(X), twice(X))
    assert "rev" not in str(jax.make_jaxpr(done)(X))


def test_default_beside_names(guest):
    report = explain(twice, X, passes=["default", "double_reverse"])
    assert report.passes[:-1] == explain(twice, X).passes
    assert report.passes[-1] == "double_reverse"
    # What is named must find a site, what comes with "default" need not.
    optimize(twice, passes=["default", "double_reverse"])(X)
    with pytest.raises(PassNotApplicable, match="double_reverse applies nowhere"):
        optimize(lambda x: x + 1, passes=["default", "double_reverse"])(X)
    assert explain(twice, X, passes=["default"]).passes == explain(twice, X).passes


def test_default_admits_what_the_contract_admits():
    bitwise = explain(twice, X, passes=["default"]).passes
    rounding = explain(twice, X, passes=["default"], contract="rounding").passes
    assert set(bitwise) < set(rounding)
    assert rounding == explain(twice, X, contract="rounding").passes


def test_what_is_asserted_is_asked_for(guest):
    assert_applied(twice, (X,), {"double_reverse": 1})
    with pytest.raises(AssertionError, match="double_reverse: applied 0, wanted 1"):
        assert_applied(lambda x: x + 1, (X,), {"double_reverse": 1})


def test_a_near_miss_is_declined_by_the_guests_own_reason(guest):
    report = explain(lambda x: lax.rev(lax.rev(x, (0,)), (1,)), X, passes=["double_reverse"])
    (site,) = report.declined
    assert [r.code for r in site.reasons] == ["other-axes"]


def test_a_value_of_another_body_is_brought(guest, equal_bits):
    def f(x):
        return lax.rev(jax.jit(lambda y: lax.rev(y, (0,)))(x), (0,)) + 1

    assert explain(f, X, passes=["double_reverse"]).counts() == {"double_reverse": 1}
    equal_bits(optimize(f, passes=["double_reverse"])(X), f(X))


def test_a_value_from_around_a_call_is_reached(guest, equal_bits):
    f = lambda x: jax.jit(lambda y: jnp.sin(lax.rev(y, (0,))))(lax.rev(x, (0,)))
    assert explain(f, X, passes=["double_reverse"]).counts() == {"double_reverse": 1}
    equal_bits(optimize(f, passes=["double_reverse"])(X), f(X))


def test_an_operand_out_of_scope_is_declined_as_the_guests_fault(guest, equal_bits):
    from guest_passes import PASS

    def named_as_captured(match):
        return Replacement((match.captures["x"].atom,), tuple(match.eqn.outvars), None, ())

    wrong = dataclasses.replace(PASS, replace=named_as_captured)
    f = lambda x: jax.jit(lambda y: jnp.sin(lax.rev(y, (0,))))(lax.rev(x, (0,)))
    (site,) = explain(f, X, passes=[wrong]).declined
    assert [r.code for r in site.reasons] == ["operand-out-of-scope"]
    assert "a fault of double_reverse" in str(site.reasons[0])


def test_an_effect_that_would_be_lost_is_declined_as_the_guests_fault(guest, equal_bits):
    from guest_passes import PASS

    def on_a_call(scope, index):
        if scope.eqns[index].primitive.name != "jit":
            return None
        return Match(scope, index, {"x": scope.eqns[index].invars[0]})

    def replaced(match):
        return Replacement((match.captures["x"],), tuple(match.eqn.outvars), None, ())

    call = jax.make_jaxpr(jax.jit(jnp.sin))(X).eqns[0].primitive
    wrong = dataclasses.replace(PASS, find=on_a_call, replace=replaced, requirements=(),
                                roots=lambda: frozenset({call}))  # fmt: skip

    @jax.jit
    def observed(x):
        jax.debug.callback(lambda v: None, x[0, 0])
        return x

    (site,) = explain(lambda x: observed(x) + 1, X, passes=[wrong]).declined
    assert [r.code for r in site.reasons] == ["effects"]
    assert "a fault of double_reverse" in str(site.reasons[0])


def test_an_effect_that_would_be_added_is_declined_as_the_guests_fault(guest):
    from guest_passes import PASS

    def reporting(match):
        def fn(x):
            jax.debug.callback(lambda v: None, x[0, 0])
            return [x]

        right = PASS.replace(match)
        return dataclasses.replace(right, fn=fn, key=("reporting",))

    wrong = dataclasses.replace(PASS, replace=reporting)
    (site,) = explain(lambda x: lax.rev(lax.rev(x, (0,)), (0,)), X, passes=[wrong]).declined
    assert [r.code for r in site.reasons] == ["effects"]
    assert "0x" not in str(site.reasons[0])


def test_a_value_in_the_place_of_its_atom_is_the_guests_fault(guest):
    from guest_passes import PASS

    def of_values(match):
        value = match.scope.resolve(match.eqn.invars[0])
        return dataclasses.replace(PASS.replace(match), operands=(value,))

    wrong = dataclasses.replace(PASS, replace=of_values)
    with pytest.raises(PassFault, match=r"double_reverse: its replace.*Value.*wanted variables"):
        explain(lambda x: lax.rev(lax.rev(x, (0,)), (0,)), X, passes=[wrong])


def test_a_constant_of_the_body_is_in_scope(guest, equal_bits):
    constant = jnp.arange(32.0).reshape(8, 4)  # closed over: no argument, and no equation makes it
    f = lambda x: x + lax.rev(lax.rev(constant, (0,)), (0,))
    assert explain(f, X, passes=["double_reverse"]).counts() == {"double_reverse": 1}
    equal_bits(optimize(f, passes=["double_reverse"])(X), f(X))


def test_a_guests_key_is_not_relied_on(guest, equal_bits):
    """One that leaves out what its function depends on would mix up two sites."""
    from guest_passes import PASS

    def replace(match):
        axes = match.captures["outer"]
        x = reach(match.scope, match.captures["x"])
        back = lambda x: [lax.rev(lax.rev(x, axes), match.captures["inner"]) * 1]
        return Replacement((x,), tuple(match.eqn.outvars), back, "always the same")

    other = dataclasses.replace(PASS, name="other", replace=replace, requirements=())
    f = lambda x: lax.rev(lax.rev(x, (0,)), (1,)) - lax.rev(lax.rev(x, (1,)), (1,))
    once = dataclasses.replace(other, find=lambda s, i: PASS.find(s, i) if i < 4 else None)
    equal_bits(optimize(f, passes=[once])(X), f(X))


def test_a_guest_lowers_to_what_a_person_would_have_written(guest):
    from relower.passes.registry import by_name

    p = by_name("double_reverse")
    (example,) = p.examples()
    got = relower.lower(optimize(p.before, passes=[p.name]), *example.args)
    want = relower.lower(p.after, *example.args)
    assert relower.diff(got, want, level="inlined").verdict is Verdict.IDENTICAL


def test_a_pass_of_ones_own_needs_no_package(guest):
    from guest_passes import PASS

    done = optimize(twice, passes=["default", PASS])
    assert "rev" not in str(jax.make_jaxpr(done)(X))
    assert "double_reverse" in explain(twice, X, passes=[PASS]).passes


def test_passes_that_cannot_be_given(guest):
    from guest_passes import PASS

    with pytest.raises(ValueError, match="another name than that of one of relower's"):
        explain(twice, X, passes=[dataclasses.replace(PASS, name="affine_gather")])
    with pytest.raises(ValueError, match="two passes called 'double_reverse'"):
        explain(twice, X, passes=[PASS, dataclasses.replace(PASS, measure="others")])
    with pytest.raises(TypeError, match="found the pass 7 of type int; wanted a name"):
        explain(twice, X, passes=[7])
    with pytest.raises(TypeError, match="a pass whose find is no function: None"):
        explain(twice, X, passes=[dataclasses.replace(PASS, find=None)])


BAD = {
    "no such module": ({"x": "nowhere:PASS"}, "nowhere:PASS can't be imported: ModuleNotFound"),
    "no such name": ({"x": "guest_passes:NOPE"}, "can't be imported: AttributeError"),
    "no pass": ({"x": "guest_passes:NOT_A_PASS"}, "is 7 of type int; wanted a relower.passes.Pass"),
    "another name": (
        {"x": "guest_passes:PASS"},
        "the entry point is called 'x', its pass 'double_reverse'",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_guest_that_cannot_be_used_says_whose_it_is(tmp_path, monkeypatch, kind):
    entries, said = BAD[kind]
    monkeypatch.syspath_prepend(install(tmp_path, entries))
    with pytest.raises(PluginError, match=r"the pass 'x' of guest-passes 1\.2: ") as caught:
        explain(twice, X, passes=["x"])
    assert said in str(caught.value)
    assert not explain(lambda x: x + 1, X).applied  # who doesn't ask for it isn't troubled


def test_names_that_are_taken(tmp_path, monkeypatch):
    """By relower: its own pass is meant by the name, and the package's other passes work."""
    entries = {"affine_gather": "guest_passes:PASS", "double_reverse": "guest_passes:PASS"}
    monkeypatch.syspath_prepend(install(tmp_path, entries))
    registry.plugins.cache_clear()
    taken, free = offered(p.name for p in registry.all_passes())
    with pytest.raises(PluginError, match="relower has a pass of that name"):
        taken.load()
    assert free.load().name == "double_reverse"
    assert registry.by_name("affine_gather") in registry.all_passes()
    assert explain(twice, X, passes=["double_reverse"]).applied


def test_two_packages_with_one_name(tmp_path, monkeypatch):
    entry = {"double_reverse": "guest_passes:PASS"}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(install(tmp_path / name, entry, name))
    both = offered(())  # one target: met twice
    assert [(p.name, p.clash) for p in both] == [("double_reverse", None)]
    other = tmp_path / "three"
    other.mkdir()
    monkeypatch.syspath_prepend(install(other, {"double_reverse": "guest_passes:NOPE"}, "three"))
    registry.plugins.cache_clear()
    with pytest.raises(PluginError, match=r"'double_reverse' of .* has a pass of that name"):
        explain(twice, X, passes=["double_reverse"])
    assert not explain(lambda x: x + 1, X, passes=["default"]).applied


def test_an_unknown_name_is_told_of_guests_too(guest):
    with pytest.raises(ValueError, match="did you mean 'double_reverse'"):
        explain(twice, X, passes=["double_revers"])


def test_the_command_line_lists_and_runs_guests(guest, capfd, monkeypatch):
    from relower.cli.main import main

    monkeypatch.setenv("PYTHONPATH", str(guest))
    monkeypatch.chdir(guest)
    (guest / "cases.py").write_text(
        textwrap.dedent("""
        from jax import lax
        def f(x):
            return lax.rev(lax.rev(x, (0,)), (0,)) + 1
        """)
    )
    assert main(["passes", "double_reverse"]) == 0
    out = capfd.readouterr().out
    assert "double_reverse  bitwise  of guest-passes 1.2" in out
    assert "def before(x):" in out
    named = ["--passes", "default,double_reverse", "--arg", "f32[8,4]"]
    assert main(["explain", "cases.py:f", *named]) == 0
    assert "1 applied" in capfd.readouterr().out
    assert main(["diff", "cases.py:f", "cases.py:f", *named, "--passes-b", "none"]) == 1
    capfd.readouterr()
    assert main(["verify", "--mutants", "--pass", "double_reverse"]) == 0  # on its own examples
    assert "VERIFIED: 1 of 1 site verified, 6 of 6 mutants killed" in capfd.readouterr().out


@pytest.mark.parametrize("command", ["explain", "lower", "verify"])
def test_the_command_line_names_the_function_of_a_guest_that_fails(
    tmp_path, capfd, monkeypatch, command
):
    from relower.cli.main import main

    wrong = MODULE.replace("    if set(inner) == set(outer):", "    if inner.axes == outer.axes:")
    install(tmp_path, {"double_reverse": "guest_passes:PASS"}, module=wrong)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases.py").write_text(
        "from jax import lax\n\ndef f(x):\n    return lax.rev(lax.rev(x, (0,)), (0,)) + 1\n"
    )
    line = wrong[: wrong.index("    if inner.axes")].count("\n") + 1
    argv = [command, "cases.py:f", "--passes", "double_reverse", "--arg", "f32[8,4]"]
    assert main([*argv, "-o", "out.rlw"] if command == "lower" else argv) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "the pass double_reverse: its check of the requirement 'other-axes', same_axes (" in said
    assert "AttributeError: 'tuple' object has no attribute 'axes' at " in said
    assert f"guest_passes.py:{line}" in said.replace(" ", "")
    assert "Traceback" not in said


def test_the_command_line_lists_a_guest_that_cannot_be_used(tmp_path, capfd, monkeypatch):
    from relower.cli.main import main

    install(tmp_path, {"x": "nowhere:PASS"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["passes"]) == 2
    out, err = capfd.readouterr()
    assert "affine_gather  bitwise" in out
    assert "the pass 'x' of guest-passes 1.2: nowhere:PASS can't be imported" in " ".join(
        (out + err).split()
    )


def test_nothing_is_loaded_with_the_package():
    code = "import sys, relower.passes; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
