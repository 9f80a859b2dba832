"""The reader of optimised HLO."""

import pytest

from relower.lowering.cost.hlo import read_hlo
from relower.lowering.cost.shapes import Shape, read_shape
from relower.lowering.errors import InputError


def test_a_recorded_program_is_read(module):
    assert module.entry.name == "main.6"
    loop = module.entry.instructions["while"]
    assert loop.called == {"condition": ("wide.region_2.5",), "body": ("wide.region_0.4.sunk",)}
    body = module.computations["wide.region_0.4.sunk"]
    sort = body.instructions["sort.8"]
    assert sort.opcode == "sort"
    assert sort.operands == ("slice_reduce_fusion.2", "iota.3")
    assert [str(s) for s in sort.shapes] == ["bf16[512]", "s32[512]"]
    assert [s.space for s in sort.shapes] == [0, 1]
    assert sort.metadata["op_name"].endswith("jit(argsort)/sort")
    assert sort.called == {"to_apply": ("region_1.1",)}
    fused = body.instructions["fusion.8"]
    assert fused.attributes["kind"] == "kOutput"
    assert fused.config["window_config"]["estimated_cycles"] == "11338"


def test_the_users_line_is_the_innermost_that_is_not_the_packages(module):
    sort = module.computations["wide.region_0.4.sunk"].instructions["sort.8"]
    assert module.source(sort) == "/home/user/model.py:10"
    # No metadata, no line.
    assert module.source(module.entry.instructions["copy.10"]) is None


def test_frames_of_this_package_are_passed_over(scan_text):
    import relower.lowering.locations as own

    text = scan_text.replace("/usr/lib/relower/lowering/", f"{own._HOUSE}/lowering/")
    loop = read_hlo(text)
    assert loop.source(loop.entry.instructions["while"]) == "/home/user/model.py:11"
    # The scan's own frame counted as ours: its caller's is taken, and that one's, to the last.
    text = text.replace('"/home/user/model.py"', f'"{own._HOUSE}/lowering/x.py"')
    assert read_hlo(text).source(loop.entry.instructions["while"]) is None


def test_metadata_of_older_versions_names_its_file():
    text = """HloModule m

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} negate(%x), metadata={op_name="f/neg" source_file="/u/m.py" source_line=4}
}
"""
    module = read_hlo(text)
    assert module.source(module.entry.root) == "/u/m.py:4"
    # A Mosaic kernel has another field in front, whose name ends alike.
    kernel = text.replace("metadata=", "frontend_attributes={kernel_metadata={}}, metadata=")
    module = read_hlo(kernel)
    assert module.source(module.entry.root) == "/u/m.py:4"
    assert module.entry.root.metadata["op_name"] == "f/neg"


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("f32[] x", [Shape("f32", ())]),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)} x", [Shape("bf16", (8, 128), 1)]),
        ("(s32[4]{0}, /*index=1*/(pred[2]{0:S(6)}, u32[])) x",
         [Shape("s32", (4,)), Shape("pred", (2,), 6), Shape("u32", ())]),
        ("f32[<=5,3] x", [Shape("f32", (5, 3))]),
        ("token[] x", [Shape("token", ())]),
        ("() x", []),
    ],
)  # fmt: skip
def test_shapes(text, shapes):
    found, end = read_shape(text)
    assert list(found) == shapes
    assert text[end:] == " x"


@pytest.mark.parametrize(
    ("shape", "size"),
    [(Shape("s4", (3,)), 2), (Shape("pred", (3,)), 3), (Shape("f8e4m3fn", (4,)), 4),
     (Shape("bf16", (2, 3)), 12), (Shape("token", ()), 0), (Shape("c64", (2,)), 16)],
)  # fmt: skip
def test_bytes(shape, size):
    assert shape.bytes == size


def test_a_config_that_is_a_quoted_string_is_read():
    text = """HloModule m

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} custom-call(%x), custom_call_target="t", backend_config="{\\"a\\": 1}"
}
"""
    root = read_hlo(text).entry.root
    assert root.config == {"a": 1}
    assert root.attributes["custom_call_target"] == "t"


def test_text_that_is_no_hlo_is_refused():
    with pytest.raises(InputError, match="no entry computation"):
        read_hlo("module @x {}")


def test_the_caller_of_a_frame_of_this_package_is_taken():
    from relower.lowering.cost.frames import read_frames
    from relower.lowering.locations import _HOUSE

    frames = read_frames(
        "HloModule m\n\nFileNames\n"
        f'1 "/u/step.py"\n2 "{_HOUSE}/passes/some.py"\n\n'
        'FunctionNames\n1 "f"\n\nFileLocations\n'
        "1 {file_name_id=1 function_name_id=1 line=5 end_line=5}\n"
        "2 {file_name_id=1 function_name_id=1 line=7 end_line=7}\n"
        "3 {file_name_id=2 function_name_id=1 line=9 end_line=9}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
        "2 {file_location_id=2 parent_frame_id=2}\n"
        "3 {file_location_id=3 parent_frame_id=3}\n"
        "4 {file_location_id=3 parent_frame_id=4}\n\n"
    )
    assert frames.source({"stack_frame_id": "4"}) == "/u/step.py:7"
    assert frames.source({"stack_frame_id": "2"}) == "/u/step.py:7"
    assert frames.source({"stack_frame_id": "9"}) is None
