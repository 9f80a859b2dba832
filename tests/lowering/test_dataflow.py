"""Level ``dataflow``: what it calls equal, and what it must never call equal."""

import pytest

from relower.lowering import dataflow

T = "tensor<4xf32>"

WRAP = """
module {{
  func.func public @main(%arg0: tensor<4xf32>, %arg1: tensor<4xf32>, %n: tensor<i32>)
      -> (tensor<4xf32>, tensor<4xf32>) {{
    {body}
  }}
}}
"""

LOOP = """
    %zero = stablehlo.constant dense<0> : tensor<i32>
    {before}
    %i, %acc, %inv = stablehlo.while(%k = %zero, %a = %arg0, %b = {carried}) :
        tensor<i32>, tensor<4xf32>, tensor<4xf32>
      cond {{
        %bound = stablehlo.constant dense<10> : tensor<i32>
        %p = stablehlo.compare LT, %k, %bound, SIGNED
          : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }} do {{
        {inside}
        %one = stablehlo.constant dense<1> : tensor<i32>
        %next = stablehlo.add %k, %one : tensor<i32>
        %new = stablehlo.add %a, {used} : tensor<4xf32>
        stablehlo.return %next, %new, {passed} : tensor<i32>, tensor<4xf32>, tensor<4xf32>
      }}
    return %acc, {result} : tensor<4xf32>, tensor<4xf32>
"""


def loop(before="", carried="%arg1", inside="", used="%b", passed="%b", result="%arg1"):
    return WRAP.format(
        body=LOOP.format(
            before=before, carried=carried, inside=inside, used=used, passed=passed, result=result
        )
    )


IOTA = "%io = stablehlo.iota dim = 0 : tensor<4xf32>"

EQUAL = {
    "dead operation": (
        "%0 = stablehlo.add %arg0, %arg1 : tensor<4xf32>\n"
        "%1 = stablehlo.sine %0 : tensor<4xf32>\n"
        "return %0, %arg1 : tensor<4xf32>, tensor<4xf32>",
        "%0 = stablehlo.add %arg0, %arg1 : tensor<4xf32>\n"
        "return %0, %arg1 : tensor<4xf32>, tensor<4xf32>",
    ),
    "equal values": (
        "%0 = stablehlo.sine %arg0 : tensor<4xf32>\n"
        "%1 = stablehlo.sine %arg0 : tensor<4xf32>\n"
        "return %0, %1 : tensor<4xf32>, tensor<4xf32>",
        "%0 = stablehlo.sine %arg0 : tensor<4xf32>\nreturn %0, %0 : tensor<4xf32>, tensor<4xf32>",
    ),
    "order of pure operations": (
        "%0 = stablehlo.sine %arg0 : tensor<4xf32>\n"
        "%1 = stablehlo.cosine %arg1 : tensor<4xf32>\n"
        "return %0, %1 : tensor<4xf32>, tensor<4xf32>",
        "%1 = stablehlo.cosine %arg1 : tensor<4xf32>\n"
        "%0 = stablehlo.sine %arg0 : tensor<4xf32>\n"
        "return %0, %1 : tensor<4xf32>, tensor<4xf32>",
    ),
}

LOOPS_EQUAL = {
    "an iota inside, captured, or carried": (
        loop(inside=IOTA, used="%io"),
        loop(before=IOTA, used="%io"),
        loop(before=IOTA, carried="%io"),
    ),
    "an invariant by name or by its initial value": (
        loop(),
        loop(used="%arg1"),
        loop(result="%inv"),
    ),
    "set in each round to what it began with": (loop(passed="%b"), loop(passed="%arg1")),
}

LOOPS_DIFFER = {
    "another iota inside": (
        loop(inside=IOTA, used="%io"),
        loop(inside=IOTA.replace("4xf32", "4xf32"), used="%a"),
    ),
    "a value that changes taken for an invariant": (
        loop(),
        loop(passed="%new"),
    ),
    "the last value of a carry taken for the first": (
        loop(passed="%new", result="%inv"),
        loop(passed="%new", result="%arg1"),
    ),
    "carried from another start": (loop(), loop(carried="%arg0")),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_at_dataflow_only(name, digests):
    first, second = (digests(WRAP.format(body=body)) for body in EQUAL[name])
    assert first["dataflow"] == second["dataflow"]
    assert first["inlined"] != second["inlined"]


@pytest.mark.parametrize("name", LOOPS_EQUAL)
def test_loops_equal(name, digests):
    assert len({digests(text)["dataflow"] for text in LOOPS_EQUAL[name]}) == 1
    assert len({digests(text)["inlined"] for text in LOOPS_EQUAL[name]}) > 1


@pytest.mark.parametrize("name", LOOPS_DIFFER)
def test_loops_differ(name, digests):
    first, second = (digests(text)["dataflow"] for text in LOOPS_DIFFER[name])
    assert first != second


CALL = "{r} = stablehlo.custom_call @{target}({x}) {{has_side_effect = {effect}}} : (T) -> T\n"


def call(result, target, operand, effect="true"):
    return CALL.format(r=result, target=target, x=operand, effect=effect).replace("T", T)


RETURN = "return %0, %1 : tensor<4xf32>, tensor<4xf32>"
DIFFER = {
    "two effects swapped": (
        call("%0", "a", "%arg0") + call("%1", "b", "%arg1") + RETURN,
        call("%1", "b", "%arg1") + call("%0", "a", "%arg0") + RETURN,
    ),
    "two unknown calls without a declared effect swapped": (
        call("%0", "a", "%arg0", "false") + call("%1", "b", "%arg1", "false") + RETURN,
        call("%1", "b", "%arg1", "false") + call("%0", "a", "%arg0", "false") + RETURN,
    ),
    "an effect done twice": (
        call("%0", "a", "%arg0") + call("%1", "a", "%arg0") + RETURN,
        call("%0", "a", "%arg0") + RETURN.replace("%1", "%0"),
    ),
    "an effect whose result is dead": (
        call("%0", "a", "%arg0") + call("%1", "a", "%arg0") + RETURN.replace("%1", "%arg1"),
        call("%0", "a", "%arg0") + RETURN.replace("%1", "%arg1"),
    ),
    "random numbers drawn once or twice": (
        "%lo = stablehlo.constant dense<0.0> : tensor<f32>\n"
        "%hi = stablehlo.constant dense<1.0> : tensor<f32>\n"
        "%sh = stablehlo.constant dense<4> : tensor<1xi64>\n"
        "%0 = stablehlo.rng %lo, %hi, %sh, distribution = UNIFORM "
        ": (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>\n"
        "%1 = stablehlo.rng %lo, %hi, %sh, distribution = UNIFORM "
        ": (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>\n" + RETURN,
        "%lo = stablehlo.constant dense<0.0> : tensor<f32>\n"
        "%hi = stablehlo.constant dense<1.0> : tensor<f32>\n"
        "%sh = stablehlo.constant dense<4> : tensor<1xi64>\n"
        "%0 = stablehlo.rng %lo, %hi, %sh, distribution = UNIFORM "
        ": (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>\n"
        + RETURN.replace("%1", "%0"),
    ),
    "two barriers or one": (
        "%0 = stablehlo.optimization_barrier %arg0 : tensor<4xf32>\n"
        "%1 = stablehlo.optimization_barrier %arg0 : tensor<4xf32>\n" + RETURN,
        "%0 = stablehlo.optimization_barrier %arg0 : tensor<4xf32>\n" + RETURN.replace("%1", "%0"),
    ),
    "barrier removed": (
        "%0 = stablehlo.optimization_barrier %arg0 : tensor<4xf32>\n"
        "%1 = stablehlo.sine %0 : tensor<4xf32>\n" + RETURN,
        "%0 = stablehlo.sine %arg0 : tensor<4xf32>\n"
        "return %arg0, %0 : tensor<4xf32>, tensor<4xf32>",
    ),
    "operands swapped": (
        "%0 = stablehlo.subtract %arg0, %arg1 : tensor<4xf32>\n" + RETURN.replace("%1", "%0"),
        "%0 = stablehlo.subtract %arg1, %arg0 : tensor<4xf32>\n" + RETURN.replace("%1", "%0"),
    ),
    "results permuted": (
        "return %arg0, %arg1 : tensor<4xf32>, tensor<4xf32>",
        "return %arg1, %arg0 : tensor<4xf32>, tensor<4xf32>",
    ),
    "second result for the first": tuple(
        "%z = stablehlo.iota dim = 0 : tensor<4xf32>\n"
        '%0, %1 = "stablehlo.sort"(%arg0, %z) <{dimension = 0 : i64, is_stable = true}> ({\n'
        "^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):\n"
        f"  %p = stablehlo.compare LT, {lanes}, FLOAT "
        ": (tensor<f32>, tensor<f32>) -> tensor<i1>\n"
        "  stablehlo.return %p : tensor<i1>\n"
        "}) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)\n"
        f"return {results} : tensor<4xf32>, tensor<4xf32>"
        for lanes, results in (("%a, %b", "%0, %1"), ("%a, %b", "%1, %0"))
    ),
    "the comparator's lane": tuple(
        "%z = stablehlo.iota dim = 0 : tensor<4xf32>\n"
        '%0, %1 = "stablehlo.sort"(%arg0, %z) <{dimension = 0 : i64, is_stable = true}> ({\n'
        "^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<f32>):\n"
        f"  %p = stablehlo.compare LT, {lanes}, FLOAT "
        ": (tensor<f32>, tensor<f32>) -> tensor<i1>\n"
        "  stablehlo.return %p : tensor<i1>\n"
        "}) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)\n" + RETURN
        for lanes in ("%a, %b", "%c, %d")
    ),
    "effect moved into a branch": (
        "%c = stablehlo.constant dense<true> : tensor<i1>\n"
        + call("%0", "a", "%arg0")
        + '%1 = "stablehlo.if"(%c) ({\n stablehlo.return %0 : tensor<4xf32>\n}, {\n'
        " stablehlo.return %arg1 : tensor<4xf32>\n}) : (tensor<i1>) -> tensor<4xf32>\n"
        "return %1, %1 : tensor<4xf32>, tensor<4xf32>",
        "%c = stablehlo.constant dense<true> : tensor<i1>\n"
        '%1 = "stablehlo.if"(%c) ({\n'
        + call("%0", "a", "%arg0")
        + " stablehlo.return %0 : tensor<4xf32>\n}, {\n"
        " stablehlo.return %arg1 : tensor<4xf32>\n}) : (tensor<i1>) -> tensor<4xf32>\n"
        "return %1, %1 : tensor<4xf32>, tensor<4xf32>",
    ),
    "branches swapped": tuple(
        "%c = stablehlo.constant dense<true> : tensor<i1>\n"
        f'%0 = "stablehlo.if"(%c) ({{\n stablehlo.return {a} : tensor<4xf32>\n}}, {{\n'
        f" stablehlo.return {b} : tensor<4xf32>\n}}) : (tensor<i1>) -> tensor<4xf32>\n"
        + RETURN.replace("%1", "%0")
        for a, b in (("%arg0", "%arg1"), ("%arg1", "%arg0"))
    ),
}


@pytest.mark.parametrize("name", DIFFER)
def test_differ(name, digests):
    first, second = (digests(WRAP.format(body=body))["dataflow"] for body in DIFFER[name])
    assert first != second


ENDLESS = """
    %t = stablehlo.constant dense<true> : tensor<i1>
    %0 = stablehlo.while(%a = %arg0) : tensor<4xf32>
      cond {{ stablehlo.return %t : tensor<i1> }}
      do {{
        %s = stablehlo.sine %a : tensor<4xf32>
        stablehlo.return %s : tensor<4xf32>
      }}
    return %arg0, %arg1 : tensor<4xf32>, tensor<4xf32>
"""


def test_a_loop_that_may_not_end_is_never_dropped(normal):
    text = WRAP.format(body=ENDLESS.format())
    assert "stablehlo.while" in normal(text).forms["dataflow"].sections[1].text


def test_a_counted_loop_that_nothing_reads_is_dropped(normal):
    text = loop().replace("return %acc, %arg1", "return %arg0, %arg1")
    assert "stablehlo.while" not in normal(text).forms["dataflow"].sections[1].text


MOVING_BOUND = """%more = stablehlo.constant dense<5> : tensor<i32>
        %bound = stablehlo.add %k, %more : tensor<i32>"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("compare LT, %k, %bound", "compare GT, %k, %bound"),
        ("compare LT, %k, %bound", "compare LT, %bound, %k"),
        ("stablehlo.add %k, %one", "stablehlo.multiply %k, %one"),
        ("%one = stablehlo.constant dense<1>", "%one = stablehlo.constant dense<0>"),
        ("stablehlo.add %k, %one", "stablehlo.add %one, %one"),
        ("%bound = stablehlo.constant dense<10> : tensor<i32>", MOVING_BOUND),
    ],
)
def test_a_loop_without_a_visible_end_is_kept(old, new, normal):
    text = loop().replace("return %acc, %arg1", "return %arg0, %arg1")
    assert old in text
    kept = normal(text.replace(old, new)).forms["dataflow"].sections[1].text
    assert "stablehlo.while" in kept


def test_a_value_stays_inside_a_manual_computation(digests, normal):
    def text(inside, outside, used):
        return f"""
module {{
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    {outside}
    %0 = sdy.manual_computation(%arg0) in_shardings=[<@mesh, [{{"x"}}]>]
        out_shardings=[<@mesh, [{{"x"}}]>] manual_axes={{"x"}} (%a: tensor<2xf32>) {{
      {inside}
      %s = stablehlo.add %a, {used} : tensor<2xf32>
      sdy.return %s : tensor<2xf32>
    }} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}"""

    iota = "%io = stablehlo.iota dim = 0 : tensor<2xf32>"
    inside = digests(text(iota, "", "%io"))["dataflow"]
    assert inside != digests(text(iota, "", "%a"))["dataflow"]
    twice = text(f"{iota}\n%jo = stablehlo.iota dim = 0 : tensor<2xf32>", "", "%jo")
    assert inside == digests(twice)["dataflow"]
    lines = normal(text(iota, "", "%io")).forms["dataflow"].sections[1].text.splitlines()
    [iota_line] = [i for i, line in enumerate(lines) if "stablehlo.iota" in line]
    [region_line] = [i for i, line in enumerate(lines) if "sdy.manual_computation" in line]
    assert region_line < iota_line


def test_nested_loops_pass_invariants_through(digests):
    def text(used):
        return WRAP.format(
            body=f"""
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %ten = stablehlo.constant dense<10> : tensor<i32>
    %r0, %r1, %r2 = stablehlo.while(%k = %zero, %a = %arg0, %b = %arg1) :
        tensor<i32>, tensor<4xf32>, tensor<4xf32>
      cond {{
        %p = stablehlo.compare LT, %k, %ten, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }} do {{
        %q0, %q1, %q2 = stablehlo.while(%l = %zero, %c = %a, %d = %b) :
            tensor<i32>, tensor<4xf32>, tensor<4xf32>
          cond {{
            %p = stablehlo.compare LT, %l, %ten, SIGNED
              : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %p : tensor<i1>
          }} do {{
            %m = stablehlo.add %l, %one : tensor<i32>
            %e = stablehlo.add %c, {used} : tensor<4xf32>
            stablehlo.return %m, %e, %d : tensor<i32>, tensor<4xf32>, tensor<4xf32>
          }}
        %next = stablehlo.add %k, %one : tensor<i32>
        stablehlo.return %next, %q1, %q2 : tensor<i32>, tensor<4xf32>, tensor<4xf32>
      }}
    return %r1, %r2 : tensor<4xf32>, tensor<4xf32>"""
        )

    assert digests(text("%d"))["dataflow"] == digests(text("%arg1"))["dataflow"]
    assert digests(text("%d"))["dataflow"] != digests(text("%a"))["dataflow"]


def test_shardings_of_carried_values_keep_their_positions(digests):
    def text(order):
        names = {"x": ("%arg0", "%a", "%s"), "inv": ("%arg1", "%b", "%b")}
        (i0, n0, r0), (i1, n1, r1) = (names[name] for name in order)
        kept = order.index("x")
        return f"""
module {{
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%arg0: tensor<4xf32>, %arg1: tensor<4xf32>) -> tensor<4xf32> {{
    %t = stablehlo.constant dense<true> : tensor<i1>
    %0:2 = stablehlo.while({n0} = {i0}, {n1} = {i1}) : tensor<4xf32>, tensor<4xf32>
      attributes {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{{"x"}}]>, <@mesh, [{{}}]>]>}}
      cond {{ stablehlo.return %t : tensor<i1> }}
      do {{
        %s = stablehlo.add %a, %b : tensor<4xf32>
        stablehlo.return {r0}, {r1} : tensor<4xf32>, tensor<4xf32>
      }}
    return %0#{kept} : tensor<4xf32>
  }}
}}"""

    first, second = digests(text(["x", "inv"])), digests(text(["inv", "x"]))
    assert first["dataflow"] != second["dataflow"]


def chain(links, last):
    """A loop whose carried values settle one after another: each is the sine of the one before."""
    inits = ["%arg0", *(f"%s{i}" for i in range(links))]
    sines = "\n".join(f"%s{i} = stablehlo.sine {inits[i]} : {T}" for i in range(links))
    carried = ["%k = %zero", "%acc = %arg1", *(f"%c{i} = {v}" for i, v in enumerate(inits))]
    types = ", ".join(["tensor<i32>", *[T] * (links + 2)])
    passed = ["%c0", *(f"%t{i}" for i in range(links))]
    inside = "\n".join(f"%t{i} = stablehlo.sine %c{i} : {T}" for i in range(links))
    body = f"""
    {sines}
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %r:{links + 3} = stablehlo.while({", ".join(carried)}) : {types}
    cond {{
      %bound = stablehlo.constant dense<10> : tensor<i32>
      %p = stablehlo.compare LT, %k, %bound, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    }} do {{
      {inside}
      %one = stablehlo.constant dense<1> : tensor<i32>
      %next = stablehlo.add %k, %one : tensor<i32>
      %new = stablehlo.add %acc, {last} : {T}
      stablehlo.return %next, %new, {", ".join(passed)} : {types}
    }}
    return %r#1, %arg1 : {T}, {T}"""
    return WRAP.format(body=body)


def test_a_chain_of_carried_values_is_followed_once(normal, digests, monkeypatch):
    rounds = []
    number = dataflow._Numbering._loop_regions
    monkeypatch.setattr(
        dataflow._Numbering,
        "_loop_regions",
        lambda self, *args: (rounds.append(1), number(self, *args))[1],
    )
    links = 40
    found = normal(chain(links, f"%c{links}"))
    assert found.ledger["loop-invariant"] == links + 1
    assert len(rounds) == 1
    outside = chain(links, f"%s{links - 1}")
    assert digests(outside)["dataflow"] == found.forms["dataflow"].digest
    assert digests(chain(links, "%c3"))["dataflow"] != found.forms["dataflow"].digest


def test_a_link_that_changes_breaks_the_chain(normal):
    broken = chain(6, "%c6").replace("%t3 = stablehlo.sine", "%t3 = stablehlo.cosine")
    assert normal(broken).ledger["loop-invariant"] == 4
