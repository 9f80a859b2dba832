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
os.environ.pop("GITHUB_STEP_SUMMARY", None)  # what tests find is no result of this run


def pytest_unconfigure():
    shutil.rmtree(os.environ["RELOWER_CACHE"], ignore_errors=True)
