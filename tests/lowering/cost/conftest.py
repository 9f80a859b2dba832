"""Recorded output of the TPU compiler, and small pieces made from it."""

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def scan_text():
    """Optimised HLO (libtpu 0.0.52) of a scan of 7 steps: a matmul of bf16[512,512], an argsort."""
    return (DATA / "scan_sort.hlo").read_text()


@pytest.fixture
def module(scan_text):
    from relower.lowering.cost.hlo import read_hlo

    return read_hlo(scan_text)


@pytest.fixture
def loop():
    """`_loop`."""
    return _loop


@pytest.fixture
def sparse_text():
    """A gather that runs on the SparseCore beside a negation, cut down from recorded HLO."""
    return SPARSE


def _loop(condition="compare(%i, %limit), direction=LT", step="add(%i, %one)", start="constant(0)"):
    """A module with one loop; the parts that a trip count is read from can be replaced."""
    return f"""HloModule m

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %one = s32[]{{:T(128)}} constant(2)
  %arg = (s32[]{{:T(128)}}, f32[8]{{0}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%arg), index=0
  %x = f32[8]{{0}} get-tuple-element(%arg), index=1
  %next = s32[]{{:T(128)}} {step}
  %y = f32[8]{{0}} negate(%x)
  ROOT %out = (s32[]{{:T(128)}}, f32[8]{{0}}) tuple(%next, %y)
}}

%cond (carried: (s32[], f32[8])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(9)
  %carried = (s32[]{{:T(128)}}, f32[8]{{0}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%carried), index=0
  ROOT %lt = pred[]{{:T(512)}} {condition}
}}

ENTRY %main (n: s32[], x: f32[8]) -> (s32[], f32[8]) {{
  %n = s32[]{{:T(128)}} parameter(0)
  %x = f32[8]{{0}} parameter(1)
  %first = s32[]{{:T(128)}} {start}
  %start = (s32[]{{:T(128)}}, f32[8]{{0}}) tuple(%first, %x)
  ROOT %while = (s32[]{{:T(128)}}, f32[8]{{0}}) while(%start), condition=%cond, body=%body
}}
"""


SPARSE = """HloModule m

%gather (table: bf16[64,256], index: s32[1024]) -> bf16[1024,256] {
  %table = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %index = s32[1024]{0:T(1024)} parameter(1)
  ROOT %g = bf16[1024,256]{1,0:T(8,128)(2,1)} gather(%table, %index), offset_dims={1}
}, execution_thread="sparsecore"

%offloaded (t: bf16[64,256], i: s32[1024]) -> bf16[1024,256] {
  %t = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[1024]{0:T(1024)} parameter(1)
  ROOT %f = bf16[1024,256]{1,0:T(8,128)(2,1)} fusion(%t, %i), kind=kCustom, calls=%gather
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[64,256], p: s32[1024]) -> bf16[1024,256] {
  %p = s32[1024]{0:T(1024)} parameter(1)
  %x = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %start = ((), (), s32[8]{0}) custom-call-start(), async_execution_thread="sparsecore", \
custom_call_target="SparseCore", called_computations={%offloaded}
  %half = s32[1024]{0:T(1024)} negate(%p), metadata={op_name="jit(f)/neg"}, \
backend_config={"bundle_analysis_data":{"estimated_cycles":"50"}}
  %update = (bf16[1024,256]{1,0}) custom-call-update(%start, %x, %half)
  ROOT %done = bf16[1024,256]{1,0:T(8,128)(2,1)} custom-call-done(%update)
}
"""
