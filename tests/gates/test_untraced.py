"""What is said of an error that ended a trace: an option's fault, or the program's."""

import jax.numpy as jnp
import pytest

from relower import optimize
from relower.gates.untraced import traced
from relower.lowering.errors import InputError


def own_error(x):
    raise ValueError("passes of the model: found 3, wanted 4")


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (lambda: optimize(jnp.sin, passes=["late_cast"], contract="value"), "contract says what"),
        (lambda: optimize(jnp.sin, passes=["late_cast"], disable=["late_cast"]), "disable: found"),
        (lambda: own_error(1), "m.py:f can't be traced: ValueError: passes of the model"),
    ],
)
def test_an_option_is_told_from_the_program(run, wanted):
    with pytest.raises(InputError) as error, traced("m.py:f", False):
        run()
    assert str(error.value).startswith(wanted)


def test_what_is_one_line_stays():
    with pytest.raises(InputError, match=r"^said already$"), traced("m.py:f", False):
        raise InputError("said already")
