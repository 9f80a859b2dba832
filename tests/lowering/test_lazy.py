"""The package's names without jax."""

import subprocess
import sys


def test_importing_the_package_does_not_import_jax():
    code = (
        "import sys, relower.lowering as l; l.InputError; l.Program; l.case; dir(l); "
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_functions_are_not_hidden_by_the_modules_of_their_names():
    from relower.lowering import case, lower

    assert callable(lower)
    assert callable(case)
    assert not hasattr(case, "Case")
