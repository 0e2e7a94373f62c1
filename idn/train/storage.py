"""Storage that takes nothing more: full, over quota or read-only. Trying again would be in vain, so a run says so."""

import errno
import os
import sys
import threading

REFUSALS = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def refusal(error: BaseException | None) -> str | None:
    """The system's words when storage is full or read-only, wherever in a chain of errors they stand.

    Libraries wrap these errors in types of their own; the words are all that they keep.

    >>> refusal(RuntimeError("I/O error: No space left on device (os error 28)"))
    'No space left on device'
    >>> refusal(TimeoutError("no answer"))
    """
    while error is not None:
        for words in REFUSALS:
            if words in str(error):
                return words
        error = error.__cause__ or error.__context__
    return None


def advice(words: str, place: str) -> str:
    """What happened, where, and what to do."""
    mend = "make it writable" if words == os.strerror(errno.EROFS) else "make room there"
    return (
        f"{words}: {place}; {mend} or choose another folder. "
        "The newest whole checkpoint stays, and the same command goes on from it"
    )


def hush_threads() -> None:
    """TensorBoard's writer thread prints what it then hands on to its caller: once is enough where storage is full."""

    def hook(failed: threading.ExceptHookArgs) -> None:
        if refusal(failed.exc_value) is None:
            sys.__excepthook__(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)

    threading.excepthook = hook
