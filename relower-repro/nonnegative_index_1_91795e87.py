# nonnegative_index#1 breaks its contract, bitwise.
#
# the values differ (random): output 0: int32[] became int64[]; 1 of 1 elements differ; another type
#
# Prints where the two differ. The inputs are input0, input1, … of nonnegative_index_1_91795e87.npz, as words of
# their types. With --again, verifies the site anew:
#
#     relower verify examples/frozen_router.py:tiny --mutants --frozen router
#
# inputs  
# before
#   v0:bool[] = lt TypedInt(0, dtype=int32), TypedInt(0, dtype=int32)
#   v1:i32[] = add TypedInt(0, dtype=int32), TypedInt(1, dtype=int32)
#   v2:i32[] = select_n v0:bool[], TypedInt(0, dtype=int32), v1:i32[]
#   gives v2:i32[]
# after
#   gives TypedInt(0, dtype=int32)

import pathlib
import subprocess
import sys

import numpy as np

if "--again" in sys.argv:
    sys.exit(subprocess.run(['relower', 'verify', 'examples/frozen_router.py:tiny', '--mutants', '--frozen', 'router']).returncode)
data = np.load(pathlib.Path(__file__).parent / "nonnegative_index_1_91795e87.npz")
for i, kind in enumerate([]):
    print(f"input {i}:", kind, list(data[f"input{i}"].shape))
differs = False
for i in range(1):
    before, after = data[f"before{i}"], data[f"after{i}"]
    wrong = np.argwhere(before != after)
    print(f"output {i}: {len(wrong)} of {before.size} words differ")
    for at in wrong[:8]:
        print(" ", at.tolist(), hex(before[tuple(at)]), "became", hex(after[tuple(at)]))
    differs |= len(wrong) > 0
sys.exit(int(differs))
