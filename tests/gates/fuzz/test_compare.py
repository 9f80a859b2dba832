"""How far apart two results may be."""

import numpy as np

from relower.gates.fuzz.compare import _compared


def compared(exact, other):
    plain = np.zeros(2, np.float32)
    return _compared([np.array(exact)], [np.array(other)], [plain], [plain], [0.0], 1e-5)


def test_what_a_type_takes_for_zero_is_no_difference():
    assert compared([0.0, 1e-285], [0.0, 0.0]) is None
    assert "in float64 the two are" in compared([0.0, 1e-30], [0.0, 0.0])
