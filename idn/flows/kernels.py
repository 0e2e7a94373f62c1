"""C++ kernels of our own (`native/`), compiled on their first use and kept in the cache."""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-w")


@cache
def kernel_library(name: str) -> ctypes.CDLL | None:
    """`native/NAME.cpp` as a library, or None, with a warning, where it cannot be had."""
    try:
        return ctypes.CDLL(str(_compiled(name)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else [str(error)]
        _warn(str((reason or [error])[0]))
        return None


@cache
def _warn(reason: str) -> None:
    """Once for all kernels that the same thing keeps from being made."""
    logging.getLogger(__name__).warning("kernels of our own are not compiled: %s", reason)


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Where tensors are, for a kernel that takes many; None for None."""
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def _compiled(name: str) -> Path:
    """The library's file. Its name tells source, flags and machine apart, so that many may share the folder."""
    compiler = os.environ.get("CXX") or "g++"
    headers = sorted(file for file in SOURCES.iterdir() if file.suffix == ".h")
    sources = [file.read_text() for file in (*headers, SOURCES / f"{name}.cpp")]
    key = "\n".join([*sources, *FLAGS, compiler, _processor()])
    # The folder of `idn/data/cache.py`, which flows do not import.
    folder = Path(os.environ.get("IDN_CACHE") or Path.home() / ".cache" / "idn") / "native"
    file = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            part, made = Path(work) / f"{name}.o", Path(work) / f"{name}.so"
            _run(compiler, *FLAGS, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(part))
            # Linked without OpenMP: torch has loaded it, and a second one would have threads of its own.
            _run(compiler, "-shared", str(part), "-o", str(made))
            made.replace(file)
    return file


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
