"""What a command printed with ``--json``, held against the documented schema."""

import functools
import json
from pathlib import Path

import jsonschema
import pytest

SCHEMA = json.loads(
    Path(__file__).parents[2].joinpath("docs", "json.schema.json").read_text(encoding="utf-8")
)


@functools.cache
def _validator(name):
    made = jsonschema.Draft202012Validator(
        {"$schema": SCHEMA["$schema"], "$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]}
    )
    made.check_schema(SCHEMA)
    return made


@pytest.fixture(scope="session")
def parsed():
    """``parsed(name, out)``: the value in ``out``, held against the schema of that name.

    The schema allows no field that it doesn't tell of.
    """

    def parse(name, out):
        value = json.loads(out)
        _validator(name).validate(value)
        return value

    return parse
