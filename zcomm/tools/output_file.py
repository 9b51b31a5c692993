"""The files that --json and --plot name: refused before anything runs, not after it."""

from __future__ import annotations

import os
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")


def why_not_writable(option: str, path: Path | None) -> str | None:
    """Why the file that option names cannot be written, or None. Leaves nothing behind."""
    if path is None:
        return None
    if option == "--plot" and path.suffix not in PICTURES:
        return f"--plot {path}: expected a name that ends in {', '.join(PICTURES)}"
    if path.is_dir():
        return f"{option} {path} is a folder; expected a file to write"
    if not path.parent.is_dir():
        return f"{option} {path} cannot be written: the folder {path.parent} does not exist"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{option} {path} cannot be written: permission denied"
    return None
