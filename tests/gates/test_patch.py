"""Suggestions as patches: what a machine writes lowers to what the pass makes, the rest is told."""

import dataclasses
import importlib.util
import subprocess
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import relower
from relower.gates.child import Job
from relower.gates.patch import patch, shown
from relower.lowering.change import Verdict

IMPORTS = "import jax\nimport jax.numpy as jnp\nfrom jax import lax\n"
I32, F32 = jax.ShapeDtypeStruct((40,), jnp.int32), jax.ShapeDtypeStruct((40,), jnp.float32)
ROWS = jax.ShapeDtypeStruct((40, 8), jnp.float32)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def write(folder, text, imports=IMPORTS):
    path = folder / "model.py"
    path.write_text(imports + "\n\n" + textwrap.dedent(text))
    return path


def patched(path, args, passes=None, **options):
    """The report of ``f`` in a file, its patch, and the file's text with the patch applied."""
    report = relower.explain(load(path), *args, passes=passes, suggest=True, **options).to_json()
    made = patch(report, path.parent)
    after = path.parent / "after"
    after.mkdir()
    (after / path.name).write_text(path.read_text())
    if made.text:
        subprocess.run(["patch", "-p1", "-s"], input=made.text, text=True, check=True, cwd=after)
    return made, after / path.name


MECHANICAL = {
    "a key in a range": (
        "argsort_packed_key",
        "def f(s):\n    return jnp.argsort(jnp.argmax(s, -1) + 0)",
        (ROWS,),
        "((keys := (jnp.argmax(s, -1) + 0)).astype(jnp.uint32) << "
        "(bits := (keys.size - 1).bit_length())) | lax.iota(jnp.uint32, keys.size), "
        "is_stable=False) & ((1 << bits) - 1)).astype(jnp.int32)",
    ),
    "a key that has a name": (
        "argsort_packed_key",
        "def f(s):\n    ids, bits = jnp.argmax(s, -1), 3\n    return jnp.argsort(ids) + bits",
        (ROWS,),
        "(ids.astype(jnp.uint32) << (bits_1 := (ids.size - 1).bit_length()))",
    ),
    "keywords that change nothing": (
        "argsort_packed_key",
        "def f(s):\n    return jnp.argsort(\n        jnp.argmax(s, -1), axis=-1, stable=True,\n"
        "    ) * 2",
        (ROWS,),
        ".astype(jnp.int32) * 2",
    ),
    "a key of any value": (
        "argsort_unique_pairs",
        "def f(x):\n    return jnp.argsort(x)",
        (F32,),
        "lax.sort((x, lax.iota(jnp.int32, x.size)), num_keys=2, is_stable=False)[1]",
    ),
    "a permutation": (
        "inverse_permutation",
        "def f(x):\n    order = lax.sort((x, lax.iota(jnp.int32, 70_000)), num_keys=1)[1]\n"
        "    return jnp.argsort(order)",
        (jax.ShapeDtypeStruct((70_000,), jnp.float32),),
        "lax.sort((order, lax.iota(jnp.int32, order.size)), num_keys=1, is_stable=False)[1]",
    ),
    "an index": (
        "nonnegative_index",
        "def f(s, t):\n    return t[jnp.argmax(s, -1)] + 1",
        (ROWS, ROWS),
        "t.at[jnp.argmax(s, -1)].get(wrap_negative_indices=False) + 1",
    ),
    "an index that is written to": (
        "nonnegative_index",
        "def f(s, t):\n    return t.at[jnp.argmax(s, -1)].add(1.0, mode='drop')",
        (ROWS, ROWS),
        "t.at[jnp.argmax(s, -1)].add(1.0, mode='drop', wrap_negative_indices=False)",
    ),
    "a table that counts": (
        "affine_gather",
        "def f(x):\n    return jnp.repeat(jnp.arange(20), 2)[jnp.argsort(x)] * 2",
        (F32,),
        "return lax.div(jnp.argsort(x), 2) * 2",
    ),
    "a table that counts, taken": (
        "affine_gather",
        "def f(x):\n    return jnp.take(jnp.tile(jnp.arange(20), 2), jnp.argsort(x), axis=0)",
        (F32,),
        "return lax.rem(jnp.argsort(x), 20)",
    ),
}


@pytest.mark.parametrize("kind", MECHANICAL)
def test_a_patch_is_what_the_pass_makes(tmp_path, kind):
    name, text, args, written = MECHANICAL[kind]
    path = write(tmp_path, text)
    made, after = patched(path, args, [name])
    assert made.edited == 1
    assert made.left == ()
    assert written in after.read_text()
    got, want = relower.lower(load(after), *args), relower.lower(
        relower.optimize(load(path), passes=[name]), *args
    )  # fmt: skip
    assert relower.diff(got, want, level="dataflow").verdict is Verdict.IDENTICAL
    assert not relower.explain(load(after), *args, passes=[name]).applied


def test_expressions_inside_of_one_another(tmp_path):
    path = write(tmp_path, "def f(s, t):\n    return t[jnp.argsort(jnp.argmax(s, -1))]\n")
    made, after = patched(path, (ROWS, ROWS), ["argsort_packed_key", "nonnegative_index"])
    assert made.edited == 2
    assert "t.at[(lax.sort(((keys := jnp.argmax(s, -1)).astype(jnp.uint32) <<" in after.read_text()
    args = jnp.sin(jnp.arange(320.0)).reshape(40, 8), jnp.arange(320.0).reshape(40, 8)
    np.testing.assert_array_equal(load(after)(*args), load(path)(*args))


LEFT = {
    "a keyword that is computed": (
        "def f(s):\n    return jnp.argsort(jnp.argmax(s, -1), stable=bool(s.ndim))",
        IMPORTS,
        "a form of its own",
    ),
    "a call by another name": (
        "by_key = jnp.argsort\ndef f(s):\n    return by_key(jnp.argmax(s, -1))",
        IMPORTS,
        "the expression by_key(jnp.argmax(s, -1)) has a form of its own",
    ),
    "no lax to call": (
        "def f(s):\n    return numpy.argsort(numpy.argmax(s, -1))",
        "from jax import numpy\n",
        "the file imports no lax",
    ),
    "another call that is declined": (
        "def order(k): return jnp.argsort(k)\n"
        "def f(s):\n    return order(jnp.argmax(s, -1)) + order((s[:, 0] * 9).astype(jnp.int32))",
        IMPORTS,
        "not every sort that it runs is rewritten",
    ),
    "another call in which there is no site": (
        "def order(k): return jnp.argsort(k)\n"
        "def f(s):\n    return order(jnp.argmax(s, -1)) + order(s[:, 0])",
        IMPORTS,
        "not every sort that it runs is rewritten",
    ),
    "another call of another rank": (
        "def order(k): return jnp.argsort(k)\n"
        "def f(s):\n    ids = jnp.argmax(s, -1)\n"
        "    return order(ids), jax.vmap(order)(ids.reshape(4, 10))",
        IMPORTS,
        "its calls are rewritten in different ways",
    ),
    "another range": (
        "def order(k): return jnp.argsort(k)\n"
        "def f(s):\n    return order(jnp.argmax(s, -1)), order(-jnp.argmax(s, -1))",
        IMPORTS,
        "its calls are rewritten in different ways",
    ),
    "no edit for it": (
        "def f(s):\n    return jnp.argsort(-jnp.argmax(s, -1))",
        IMPORTS,
        "the change isn't mechanical",
    ),
    "a comment": (
        "def f(s):\n    return jnp.argsort(\n        jnp.argmax(s, -1),  # by expert\n    )",
        IMPORTS,
        "a comment stands in it",
    ),
    "a name that is something else": (
        "def f(s):\n    lax = jnp\n    return lax.argsort(jnp.argmax(s, -1))",
        IMPORTS,
        "lax is the name of something else in the file too",
    ),
    "no place for an assignment": (
        "def f(s):\n    return [i for i in jnp.argsort(jnp.argmax(s, -1))]",
        IMPORTS,
        "what it would be can't stand there: assignment expression cannot be used in a "
        "comprehension iterable",
    ),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_to_the_reader_is_told(tmp_path, kind):
    text, imports, why = LEFT[kind]
    path = write(tmp_path, text, imports)
    made, after = patched(path, (ROWS,), ["argsort_packed_key"])
    assert after.read_text() == path.read_text()
    assert made.edited == 0
    (line,) = made.left
    assert line.startswith("model.py:")
    assert "argsort_packed_key: " in line
    assert why in line


def test_calls_that_different_passes_rewrite(tmp_path):
    text = """
        def order(k): return jnp.argsort(k)
        def f(s, x):
            return order(jnp.argmax(s, -1)), order(x)
    """
    both = ["argsort_packed_key", "argsort_unique_pairs"]
    made, _ = patched(write(tmp_path, text), (ROWS, I32), both)
    assert made.edited == 0
    (line,) = made.left
    assert line.endswith(": its calls are rewritten in different ways")
    assert line.startswith(tuple(f"model.py:7: {name}" for name in both))


def test_one_expression_run_with_two_tables(tmp_path):
    text = """
        def f(x):
            ids = jnp.argsort(x)
            return [jnp.take(jnp.repeat(jnp.arange(40 // k), k), ids) for k in (2, 4)]
    """
    made, _ = patched(write(tmp_path, text), (F32,), ["affine_gather"])
    assert made.edited == 0
    assert "affine_gather: its calls are rewritten in different ways" in made.left[0]


def test_one_body_that_several_calls_run_is_patched_in_each(tmp_path):
    text = """
        def f(s):
            first = jnp.argsort(jnp.argmax(s, -1))
            return first + jnp.argsort(jnp.argmax(s + 1, -1))
    """
    made, after = patched(write(tmp_path, text), (ROWS,), ["argsort_packed_key"])
    assert made.edited == 2
    assert "argsort" not in after.read_text()


def test_calls_of_other_sizes_are_one_text(tmp_path):
    text = """
        def order(k): return jnp.argsort(k)
        def f(s):
            return order(jnp.argmax(s, -1))[:20] + order(jnp.argmax(s[:20], -1))
    """
    path = write(tmp_path, text)
    made, after = patched(path, (ROWS,), ["argsort_packed_key"])
    assert made.edited == 1
    assert made.given == (
        "model.py:7: argsort_packed_key: keys in [0, 7], at most 536,870,912 rows",
    )
    s = jnp.sin(jnp.arange(320.0)).reshape(40, 8)
    np.testing.assert_array_equal(load(after)(s), load(path)(s))


OTHERS = {
    "sizes differ": ("jnp.argmax(s, -1)", "jnp.argsort({})", None),
    "ranges differ, both fit": ("jnp.argmax(s, -1) * 2", "jnp.argsort({})", None),
    "it isn't rewritten there": (
        "s[:, 0].astype(jnp.int32)",
        "jnp.argsort({})",
        "in wide it isn't rewritten",
    ),
    "it would be written in another way": (
        "-jnp.argmax(s, -1)",
        "jnp.argsort({})",
        "in wide the change isn't mechanical",
    ),
    "numbers differ": (
        "jnp.argsort(s[:, 0])",
        "jnp.repeat(jnp.arange(s.shape[0] // s.shape[1]), s.shape[1])[{}]",
        "in wide it would have to be written in another way",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_patch_is_right_for_the_other_cases_of_the_file(tmp_path, kind):
    """The text is one for both cases, or the expression stays, with the reason."""
    key, expression, why = OTHERS[kind]
    narrow = key if "numbers" in kind else "jnp.argmax(s, -1)"
    path = write(
        tmp_path,
        f"""
        def order(keys, s):
            return {expression.format("keys")}
        def f(s):
            return order({narrow}, s)
        def wide(s):
            return order({key}, s)
    """,
    )
    name = "affine_gather" if "numbers" in kind else "argsort_packed_key"
    small, large = ROWS, jax.ShapeDtypeStruct((96, 16), jnp.float32)
    spec = importlib.util.spec_from_file_location("both", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reports = [
        relower.explain(f, x, passes=[name], suggest=True).to_json()
        for f, x in ((module.f, small), (module.wide, large))
    ]
    assert patch(reports[0], path.parent).edited == 1
    made = patch(reports[0], path.parent, {"wide": reports[1]})
    assert made.edited == (why is None)
    assert made.reached == (("wide",) if why is None else ())
    assert [line.partition(": ")[2] for line in made.left] == ([f"{name}: {why}"] if why else [])
    if "ranges" in kind:
        assert [line.rpartition(": ")[2] for line in made.given] == [
            "keys in [0, 7], at most 536,870,912 rows",
            "keys in [0, 30], at most 134,217,728 rows",
        ]


def test_a_call_without_arguments(tmp_path):
    path = write(tmp_path, "def f(s):\n    return s.at[jnp.argmax(s, -1)].get()")
    made, after = patched(path, (ROWS,), ["nonnegative_index"])
    assert made.edited == 1
    assert "s.at[jnp.argmax(s, -1)].get(wrap_negative_indices=False)" in after.read_text()


def test_a_file_that_has_changed(tmp_path):
    path = write(tmp_path, "def f(s):\n    return jnp.argsort(jnp.argmax(s, -1))")
    report = relower.explain(load(path), ROWS, suggest=True).to_json()
    for text, why in (
        ("", "there is no expression of these columns"),
        ("def f(:\n", "it is no Python that can be read"),
    ):
        path.write_text(text)
        assert why in " ".join(patch(report, tmp_path).left)
    path.unlink()
    assert "it can't be read" in " ".join(patch(report, tmp_path).left)


def test_an_installed_package_is_left_alone(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    path = write(folder, "def f(s):\n    return jnp.argsort(jnp.argmax(s, -1))")
    made = patch(relower.explain(load(path), ROWS, suggest=True).to_json(), tmp_path)
    assert made.text == ""
    assert made.left == ("site-packages/model.py: it belongs to an installed package",)


def test_characters_of_several_bytes(tmp_path):
    text = "def f(s):\n    ü = 'äöü'; return jnp.argsort(jnp.argmax(s, -1)), ü\n"
    path = write(tmp_path, text.replace(", ü\n", "\n"))
    made, after = patched(path, (ROWS,), ["argsort_packed_key"])
    assert made.edited == 1
    assert "ü = 'äöü'; return (lax.sort(" in after.read_text()


def test_a_patch_is_held_against_the_program(tmp_path):
    """Text that is loaded in place of a file: the same, another, none that can be loaded."""
    path = write(tmp_path, "def f(s):\n    return jnp.argsort(jnp.argmax(s, -1))")
    made, _ = patched(path, (ROWS,), ["argsort_packed_key"])
    job = Job("lower", spec=f"{path}:f", args=("f32[40,8]",), passes=("argsort_packed_key",))
    assert shown(made, job) is None
    other = {str(path): made.files[str(path)].replace("<< bits) - 1", "<< bits) - 2")}
    assert shown(dataclasses.replace(made, files=other), job) == "DIFFERENT at level dataflow"
    broken = {str(path): "def f(:"}
    assert "SyntaxError" in shown(dataclasses.replace(made, files=broken), job)
    assert "argsort" in path.read_text()


def test_every_pass_says_something():
    from relower.passes.registry import all_passes

    assert all(p.suggest for p in all_passes())
