"""The environment of every test, set before jax loads."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))  # what several tests are made of

pytest_plugins = ["pytester"]

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.pop("CI", None)  # which tests set where they mean it
os.environ["RELOWER_CACHE"] = tempfile.mkdtemp(prefix="relower-test-cache-")
_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _WORKER:  # workers and what tests start share what XLA has compiled for the CPU
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="relower-test-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.pop("GITHUB_STEP_SUMMARY", None)  # what tests find is no result of this run


def pytest_unconfigure():
    shutil.rmtree(os.environ["RELOWER_CACHE"], ignore_errors=True)
    if not _WORKER:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
