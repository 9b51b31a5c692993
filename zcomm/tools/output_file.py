"""The files that --json and --plot name: refused before anything runs, not after it, and written."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zcomm.errors import ZcommError

PICTURES = (".png", ".svg", ".pdf")


def why_not_writable(option: str, path: Path | None) -> str | None:
    """Why the file that option names cannot be written, or None. Leaves nothing behind."""
    if path is None:
        return None
    if option == "--plot" and path.suffix not in PICTURES:
        return f"--plot {path}: expected a name that ends in {', '.join(PICTURES)}"
    try:
        if path.is_dir():
            return f"{option} {path} is a folder; expected a file to write"
        if not path.parent.is_dir():
            return f"{option} {path} cannot be written: the folder {path.parent} does not exist"
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            return f"{option} {path} cannot be written: permission denied"
    except OSError as problem:  # a name too long, or a folder that may not be looked into
        return f"{option} {path} cannot be written: {problem.strerror}"
    return None


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Around what writes the file that option names. Raises ZcommError if it cannot be written after all."""
    try:
        yield
    except OSError as problem:
        raise ZcommError(f"{option} {path} cannot be written: {problem.strerror or problem}") from problem


def write_json(
    path: Path,
    value: Any,  # of dicts, lists and numbers; one that JSON does not know, infinite or not a number, becomes null
) -> None:
    """Write what --json asked for. Raises ZcommError if the file cannot be written."""
    with writing("--json", path):
        path.write_text(json.dumps(_as_json_has_it(value), indent=1, allow_nan=False) + "\n")


def _as_json_has_it(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json_has_it(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json_has_it(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
