"""The child that compiles for a TPU: ``python -m relower.lowering.compile_child FOLDER PARENT``.

It reads ``module.bc`` and ``request.json`` in FOLDER and writes ``hlo.txt`` and ``answer.json``.
libtpu reads its flags once and may abort the process, so it is loaded here and nowhere else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from .orphan import end_with_parent


def main() -> int:
    """Compiles what the folder holds; an answer is written where nothing crashes."""
    end_with_parent(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # aborts are expected
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    answer = _compiled(folder, request)
    part = folder / "answer.part"
    part.write_text(json.dumps(answer))
    os.replace(part, folder / "answer.json")
    sys.stdout.flush()
    os._exit(0)  # libtpu's own end takes seconds, and has been seen to hang


def _compiled(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    try:
        import libtpu  # noqa: F401
    except ImportError:
        return {"error": "libtpu isn't installed: install relower[tpu]", "kind": "missing"}

    from ..compat.compiler import (
        compile_module,
        executable_cost,
        executable_memory,
        executable_text,
    )
    from .errors import InputError
    from .load import describe
    from .targets import parse_target, topology_devices

    try:
        devices = topology_devices(parse_target(request["target"]))
    except InputError as error:
        return {"error": str(error), "kind": "target"}
    try:
        executable = compile_module(
            (folder / "module.bc").read_bytes(), request["settings"], devices
        )
    except Exception as error:
        return {"error": describe(error), "kind": "rejected"}
    (folder / "hlo.txt").write_text(executable_text(executable))
    return {"memory": executable_memory(executable), "cost": executable_cost(executable)}


if __name__ == "__main__":
    main()
