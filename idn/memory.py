"""Memory on a CPU: how much a process has held, and freed memory kept for the next tensor.

glibc gives large blocks back to the system as soon as they are freed and gets them anew, page by page and zeroed, for
the next tensor: on activations of tens of megabytes that takes longer than the arithmetic on them.
"""

import ctypes
import gc
import sys
from pathlib import Path

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Names of glibc's mallopt(3) for: give back free memory above this size; so many blocks of their own."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def keep_freed_memory() -> bool:
    """Lets this process reuse large freed blocks; False where the C library has no such setting."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(MMAP_MAX, 0), mallopt(TRIM_THRESHOLD, 2**31 - 1)])


def spare_collector() -> None:
    """Takes all objects there are out of garbage collection; to be called once what lasts is made.

    Torch alone brings a million objects, and a loop of small steps would have them looked at again and again.
    """
    gc.collect()
    gc.freeze()


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: now, and at most so far. Zeros where the system does not tell.

    Pages of files do not count: the code of libraries comes in as it is used, is shared, and can be dropped.
    """
    if not STATUS.exists():
        return 0, 0
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    now, most, files = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile"))
    return now - files, most - files


def forget_peak() -> None:
    """Starts the count of the most memory anew."""
    if CLEAR.exists():
        CLEAR.write_text("5")
