"""Parts of a matrix: each cell in exactly one, whatever stands around it."""

import pytest

from relower.gates.config import load_matrix
from relower.gates.shard import Shard, parse_shard
from relower.lowering.errors import InputError


def cells(tmp_path, *variants):
    text = '[[program]]\nname = "p"\nvariants.base = "m.py:base"\n'
    text += "".join(f'variants.{name} = "m.py:{name}"\n' for name in variants)
    text += "".join(
        f'[[program.cell]]\nvariant = "{name}"\ndiffers-from = "base"\n' for name in variants
    )
    (tmp_path / "relower.toml").write_text(text)
    return load_matrix(tmp_path / "relower.toml").cells


NAMES = [f"v{number}" for number in range(60)]


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_each_cell_is_in_exactly_one_part(tmp_path, count):
    whole = cells(tmp_path, *NAMES)
    parts = [Shard(number, count).of(whole) for number in range(1, count + 1)]
    assert sorted(cell.name for part in parts for cell in part) == sorted(c.name for c in whole)
    order = {cell.name: index for index, cell in enumerate(whole)}
    for part in parts:
        assert [order[cell.name] for cell in part] == sorted(order[cell.name] for cell in part)
    if count in (2, 7):
        assert all(part for part in parts)


def test_other_cells_move_no_cell(tmp_path):
    before = {c.name for c in Shard(2, 3).of(cells(tmp_path, *NAMES))}
    after = {c.name for c in Shard(2, 3).of(cells(tmp_path, "new", *reversed(NAMES[7:])))}
    gone = {f"p: {name} ≠ base (exact)" for name in NAMES[:7]}
    assert after - {"p: new ≠ base (exact)"} == before - gone


def test_the_assignment_is_the_same_in_every_release(tmp_path):
    whole = cells(tmp_path, *NAMES[:8])
    assert [next(n for n in (1, 2, 3) if c in Shard(n, 3).of(whole)) for c in whole] == PINNED


PINNED = [3, 3, 3, 1, 2, 1, 1, 1]


def test_parse():
    assert parse_shard("2/3") == Shard(2, 3)
    assert str(parse_shard("1/1")) == "1/1"
    for bad in ("0/3", "4/3", "1", "1/", "/2", "a/2", "1/2/3", "-1/2", "1/0", "²/3", ""):
        with pytest.raises(InputError, match="wanted I/N with I from 1 to N"):
            parse_shard(bad)
