"""Store a `Program` in one file, and read one back that may come from a stranger.

The file is a zip of three kinds of member:

- ``index.json``: what is compared, as a Merkle tree. The leaves are the sha256 digests of the
  canonical texts, the nodes are the forms, the kernels, the counts, the stamp and the unknowns,
  and ``root`` is the digest over the nodes;
- ``text/<sha256>.mlir``: each distinct canonical text once, named by its digest;
- ``locations.json``: source lines, labels and the callers of platform queries. Not under the
  root, because two equal programs may come from different files; its own digest is in the index,
  so that damage is still noticed.

The same program gives the same bytes. Nothing here runs a parser of MLIR, unpickles, or takes a
path from the file, and every size is bounded before memory is spent on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

from .artifact_index import (
    FORMAT,
    VERSION,
    Malformed,
    canonical_json,
    index_of,
    locations_of,
    program_from,
)
from .errors import InputError
from .program import Program

MAX_FILE_BYTES = 1 << 30
"""The largest artifact that is opened, in bytes."""
MAX_EXPANDED_BYTES = 1 << 32
"""The most bytes that all members of one artifact may expand to."""
MAX_INDEX_BYTES = 1 << 28
"""The largest ``index.json`` and ``locations.json``, expanded, in bytes."""
MAX_MEMBERS = 200_000
"""The most members an artifact may have."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
_TEXT = re.compile(r"text/([0-9a-f]{64})\.mlir")
_FAULTS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    RuntimeError,
    ValueError,
    Malformed,
)
"""What `zipfile`, `json` and the schema raise on damaged bytes."""


def save(program: Program, path: str | os.PathLike[str]) -> None:
    """Write ``program`` to ``path``, replacing what was there only once all of it is on disk.

    Raises:
        InputError: the place can't be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise InputError(f"{target}: can't be written: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(dumps(program))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        raise InputError(f"{target}: can't be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def dumps(program: Program) -> bytes:
    """The bytes of ``program``'s artifact: the same bytes for the same program."""
    index, texts = index_of(program)
    locations = canonical_json(locations_of(program))
    index["locations"] = _sha256(locations)
    members = {f"text/{digest}.mlir": text.encode() for digest, text in sorted(texts.items())}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, data in (
            ("index.json", canonical_json(index)),
            ("locations.json", locations),
            *members.items(),
        ):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def load(path: str | os.PathLike[str]) -> Program:
    """Read the artifact at ``path``, checking its schema and every digest.

    Raises:
        InputError: there is no such file, or it isn't a whole, undamaged artifact. One line.
    """
    target = Path(path)
    try:
        if not target.is_file():
            what = "is not a file" if target.exists() else "no such file"
            raise InputError(f"{target}: {what}; wanted an artifact written by `relower lower -o`")
        size = target.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputError(f"{target}: {size} bytes; an artifact has at most {MAX_FILE_BYTES}")
        data = target.read_bytes()
    except OSError as error:
        raise InputError(f"{target}: can't be read: {error.strerror or error}") from error
    except ValueError as error:  # an embedded null byte
        raise InputError(f"{str(target)!r}: not a path: {error}") from error
    return loads(data, str(target))


def loads(data: bytes, name: str = "artifact") -> Program:
    """Read an artifact from ``data``; ``name`` is what messages call it.

    Raises:
        InputError: the bytes aren't a whole, undamaged artifact. One line.
    """
    try:
        return _read(data)
    except _FAULTS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{name}: not a whole relower artifact ({reason}); write it again with "
            "`relower lower FILE.py:NAME -o FILE`"
        ) from error


def _read(data: bytes) -> Program:
    budget = MAX_EXPANDED_BYTES
    texts: dict[str, str] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        if len(infos) != len(archive.infolist()):
            raise Malformed("two members have one name")
        if len(infos) > MAX_MEMBERS:
            raise Malformed(f"{len(infos)} members; at most {MAX_MEMBERS}")
        index = _json(_member(archive, infos, "index.json", MAX_INDEX_BYTES))
        if index.get("format") != FORMAT:
            raise Malformed(f"format {index.get('format')!r:.40}; wanted {FORMAT!r}")
        if index.get("version") != VERSION:
            raise Malformed(f"version {index.get('version')!r:.40}; this relower reads {VERSION}")
        raw_locations = _member(archive, infos, "locations.json", MAX_INDEX_BYTES)
        if _sha256(raw_locations) != index.get("locations"):
            raise Malformed("locations.json doesn't have the digest the index states")
        for member in infos:
            if member in ("index.json", "locations.json"):
                continue
            match = _TEXT.fullmatch(member)
            if match is None:
                raise Malformed(f"unexpected member {member!r:.80}")
            body = _member(archive, infos, member, budget)
            budget -= len(body)
            if _sha256(body) != match[1]:
                raise Malformed(f"member {member[:17]}… doesn't have the digest it is named by")
            texts[match[1]] = body.decode()
    return program_from(index, _json(raw_locations), texts)


def _member(
    archive: zipfile.ZipFile, infos: dict[str, zipfile.ZipInfo], name: str, limit: int
) -> bytes:
    """One member, read no further than ``limit`` whatever its header claims."""
    if name not in infos:
        raise Malformed(f"no member {name}")
    if infos[name].compress_type != zipfile.ZIP_DEFLATED:
        raise Malformed(f"{name} is compressed by method {infos[name].compress_type}; wanted 8")
    if infos[name].file_size > limit:
        raise Malformed(f"{name} expands to over {limit} bytes")
    with archive.open(infos[name]) as file:
        body = file.read(limit + 1)
    if len(body) > limit:
        raise Malformed(f"{name} expands to over {limit} bytes")
    return body


def _json(data: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> Any:
        raise Malformed(f"{constant} is not a value an artifact holds")

    value = json.loads(data.decode(), parse_constant=refuse)
    if not isinstance(value, dict):
        raise Malformed("the index is not an object")
    return value


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
