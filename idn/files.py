"""Files that are whole or not there: written under a temporary name, then renamed."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

UMASK = os.umask(0)
os.umask(UMASK)


def write_bytes(path: Path, content: bytes) -> None:
    """Puts `content` at `path` in one step."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(handle, 0o666 & ~UMASK)  # a temporary file is private at first
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """JSON for people: indented, one trailing newline."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())
