"""Costs of instructions: work, bytes, FLOPs, what bounds them."""

import pytest

from relower.lowering.cost.census import collectives, counts
from relower.lowering.cost.chip import chip_of
from relower.lowering.cost.estimate import Figures, op_costs, unknown_loops
from relower.lowering.cost.flops import flops
from relower.lowering.cost.hlo import read_hlo
from relower.lowering.cost.profile import available, read_profiles
from relower.lowering.cost.traffic import hbm_bytes
from relower.lowering.errors import InputError

CHIP = chip_of("TPU7x:2x2x1")
NONE = Figures("counts", {}, {})


def by_name(module, figures=NONE):
    return {op.name: op for op in op_costs(module, CHIP, figures)}


def test_what_works_in_a_recorded_loop(module):
    ops = by_name(module, Figures("salvaged", {"sort.8": 6873}, {"sort.8": 907}))
    assert set(ops) == {
        "copy.10", "copy.16", "iota.3", "slice_reduce_fusion.2", "fusion.8", "sort.8",
        "dynamic_update_slice.3", "copy.15",
    }  # fmt: skip
    sort = ops["sort.8"]
    assert (sort.kind, sort.times, sort.estimate, sort.rung) == ("sort of 2", 7, 6873, "salvaged")
    assert sort.bundles == 907
    assert sort.source == "/home/user/model.py:10"
    assert sort.total_estimate == 7 * 6873
    assert ops["copy.10"].rung == "counts"
    assert ops["copy.10"].figure is None
    assert ops["copy.10"].bound == "unknown"


def test_bytes_in_other_memories_count_nothing(module):
    ops = by_name(module)
    assert ops["copy.10"].hbm_bytes == 512 * 512 * 2  # read from HBM, written to VMEM
    assert ops["fusion.8"].hbm_bytes == 0
    # One row of the result is written in place.
    assert ops["dynamic_update_slice.3"].hbm_bytes < 7 * 512 * 4 + 512


def test_flops_of_a_fused_product(module):
    assert by_name(module)["fusion.8"].flops == 2 * 512**3


def op_of(line, *more):
    lines = "\n".join(f"  {x}" for x in (*more, f"ROOT %r = {line}"))
    module = read_hlo(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")
    return module, module.entry, module.entry.root


@pytest.mark.parametrize(
    ("left", "right", "line", "expected"),
    [
        ("f32[4,8]{1,0}", "f32[8,3]{1,0}",
         "f32[4,3]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
         2 * 4 * 3 * 8),
        ("f32[4,8]{1,0}", "f32[8,3]{1,0}",
         "f32[4,3]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", 2 * 4 * 3 * 8),
        # A window of 3 over 5 positions, padded by one: 13 of 15 fall on an element.
        ("f32[2,5,7]{2,1,0}", "f32[3,7,9]{2,1,0}",
         "f32[2,5,9]{2,1,0} convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
         2 * 2 * 9 * 7 * 13),
        # A batch of 6 products, as the TPU compiler writes it: a dilated window, one hit a row.
        ("f32[6,4,8]{2,1,0}", "f32[6,8,3]{2,1,0}",
         "f32[6,4,3]{2,1,0} convolution(%a, %b), "
         "window={size=6 stride=5 pad=0_0 lhs_dilate=6}, dim_labels=0bf_0io->0bf",
         2 * 4 * 3 * 8 * 6),
        ("f32[2,9,1]{2,1,0}", "f32[2,1,1]{2,1,0}",
         "f32[2,4,1]{2,1,0} convolution(%a, %b), window={size=2 stride=2 rhs_dilate=2}, "
         "dim_labels=b0f_0io->b0f", 2 * 2 * 8),
    ],
)  # fmt: skip
def test_flops(left, right, line, expected):
    module, where, op = op_of(line, f"%a = {left} parameter(0)", f"%b = {right} parameter(1)")
    assert flops(module, where, op) == expected


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("dilate", [1, 2, 4, 6])
@pytest.mark.parametrize("pad", [-1, 0, 2, 5])
def test_window_positions_are_counted_as_by_hand(stride, dilate, pad):
    size, kernel, out, spread = 4, 3, 7, 2
    by_hand = sum(
        0 <= o * stride - pad + k * spread <= (size - 1) * dilate
        and (o * stride - pad + k * spread) % dilate == 0
        for o in range(out)
        for k in range(kernel)
    )
    window = f"size={kernel} stride={stride} pad={pad}_0 lhs_dilate={dilate} rhs_dilate={spread}"
    module, where, op = op_of(
        f"f32[1,{out},1]{{2,1,0}} convolution(%a, %b), window={{{window}}}, "
        "dim_labels=b0f_0io->b0f",
        f"%a = f32[1,{size},1]{{2,1,0}} parameter(0)",
        f"%b = f32[{kernel},1,1]{{2,1,0}} parameter(1)",
    )
    assert flops(module, where, op) == 2 * by_hand


def test_only_the_rows_that_are_gathered_count():
    module, where, op = op_of(
        "f32[4,16]{1,0} gather(%t, %i), offset_dims={1}",
        "%t = f32[1000,16]{1,0} parameter(0)", "%i = s32[4]{0} parameter(1)",
    )  # fmt: skip
    assert hbm_bytes(module, where, op) == 4 * 16 * 4 + 4 * 4 + 4 * 16 * 4


def test_a_figure_is_no_less_than_its_bytes_take(sparse_text):
    big = sparse_text.replace("1024", str(2**24))
    ops = by_name(read_hlo(big), Figures("profile", {}, {}))
    half = ops["half"]
    moved = 2 * 4 * 2**24
    assert half.estimate == 50
    assert half.figure == pytest.approx(moved / CHIP.hbm_bandwidth * CHIP.clock)
    assert half.bound == "HBM"
    small = by_name(read_hlo(sparse_text), Figures("profile", {}, {}))["half"]
    assert (small.figure, small.bound) == (50.0, "estimate")


def test_sparse_core_work_is_listed_with_its_bytes_and_no_figure(sparse_text):
    ops = by_name(read_hlo(sparse_text), Figures("profile", {}, {}))
    start = ops["start"]
    assert (start.kind, start.sparse, start.figure) == ("SparseCore gather", True, None)
    assert start.hbm_bytes == 64 * 256 * 2 + 1024 * 4 + 1024 * 256 * 2
    assert ops["done"].hbm_bytes == 0


def test_a_loop_of_unknown_count_has_no_total(loop):
    module = read_hlo(loop(start="copy(%n)"))
    ops = by_name(module, Figures("salvaged", {"y": 100}, {}))
    assert unknown_loops(module) == ["while"]
    assert (ops["y"].times, ops["y"].figure, ops["y"].total) == (None, 100.0, None)


CONDITIONAL = """HloModule m

%one (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %cheap = f32[8]{0} negate(%a)
}

%two (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %dear = f32[8]{0} sine(%b)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %r = f32[8]{0} conditional(%i, %x, %x), branch_computations={%one, %two}
}
"""


def test_of_branches_the_costliest_counts():
    ops = by_name(read_hlo(CONDITIONAL), Figures("salvaged", {"cheap": 10, "dear": 90}, {}))
    assert {name: op.total for name, op in ops.items()} == {"cheap": 0, "dear": 90}


@pytest.mark.parametrize("value", ["9223372036854775807", "0", "-1", "", None, "x"])
def test_not_available(value):
    assert available(value) is None


def test_files_of_an_analysis_that_was_cut_short(tmp_path):
    entry = 'hlo_op_estimate {{\n  hlo_op_name: "{}"\n  estimated_cycles: {}\n}}\n'
    (tmp_path / "a.textproto").write_text(entry.format("sort.8", 6873))
    (tmp_path / "b.textproto").write_text(entry.format("x", 2**63 - 1) + entry.format("y", 5))
    (tmp_path / "c.textproto").write_text('hlo_op_estimate {\n  hlo_op_name: "cut')
    assert read_profiles(tmp_path) == ({"sort.8": 6873, "y": 5}, 1)


def test_counts(module, sparse_text):
    kinds, sorts = counts(module)
    assert sorts == {2: 1}
    assert kinds["convolution"] == 1
    assert kinds["convert"] == 2  # the fused ones; those of the comparison are none
    assert kinds["while"] == 1
    assert counts(read_hlo(sparse_text))[0]["gather"] == 1


def test_collectives_are_estimated_apart():
    text = """HloModule m

ENTRY %main (x: bf16[1024]) -> bf16[4096] {
  %x = bf16[1024]{0} parameter(0)
  %g = (bf16[1024]{0}, bf16[4096]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]
  %d = bf16[4096]{0} all-gather-done(%g)
  ROOT %r = bf16[4096]{0} all-reduce(%d), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""
    found = {c.kind: c for c in collectives(read_hlo(text), CHIP)}
    assert found["all-gather"].bytes == 2048 * 3
    assert found["all-reduce"].bytes == 2 * 8192 // 2
    assert found["all-reduce"].seconds == 8192 / CHIP.link_bandwidth


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("mesh['data'=8] {'data'}", 8),
        ("mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("mesh['a'=4,'b'=2] {'b'}", 2),
        ("mesh['a'=8] {'a':(1)4}", 4),
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[8]", 2),
    ],
)
def test_a_collective_sends_to_its_group(groups, size):
    module, _, op = op_of(
        f"f32[64]{{0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add",
        "%a = f32[64]{0} parameter(0)",
    )
    (found,) = collectives(module, CHIP)
    assert found.bytes == 2 * 256 * (size - 1) // size, op.attributes


def test_a_chip_without_figures():
    with pytest.raises(InputError, match="no figures for 'TPU9'; known: TPU7x"):
        chip_of("TPU9:1x1x1")
