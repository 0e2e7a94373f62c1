"""A small disk of its own: a tmpfs that a test fills or makes read-only."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """A mounted folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, left: int = 0) -> None:
        """Takes all room but `left` bytes."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        size = self._filler.stat().st_size
        with self._filler.open("r+b") as file:
            file.truncate(max(0, size - left))

    def empty(self) -> None:
        """Gives the room back."""
        self._filler.unlink()

    def refuse(self, writes: bool = True) -> None:
        """Makes the disk read-only, or writable again. Files open for writing would forbid it."""
        options = f"remount,{'ro' if writes else 'rw'}"
        subprocess.run(["mount", "-o", options, str(self.folder)], check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Mounts a disk of so many megabytes, or skips the test where mounting is not permitted."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs a disk of its own, and mounting is not permitted: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        # Lazily: a process that is about to end may still have a file open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
