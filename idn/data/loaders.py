"""Loader processes: each reads batches ahead and sends them, in order, through a pipe of its own.

They come from a fork server: to fork a training process, full of the threads of torch and Ray, can deadlock,
while the server forks from a process that has done nothing but import. They use no torch threads, and end by
themselves when the other end of their pipe is gone.
"""

import contextlib
import multiprocessing
import signal
import socket
from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice
from multiprocessing.connection import Connection

import numpy as np

from idn.data.reader import Answer, Reader, Request
from idn.errors import UserError

AHEAD = 3
"""Batches asked of each process in advance."""


class Loaders:
    """Reads batches in `count` processes; answers come in the order of the requests."""

    def __init__(self, reader: Reader, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipes: list[Connection] = []
        self._waiting: deque[Connection] = deque()
        self._iteration = 0
        self.processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            _widen(theirs)
            process = context.Process(target=_serve, args=(reader, theirs), name="idn-loader", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def read(self, requests: Iterator[Request]) -> Iterator[Answer]:
        """Answers to all requests. A new iteration discards what an abandoned one had asked for."""
        self._iteration += 1
        mine = self._iteration
        while self._waiting:
            self._receive()
        pipes = cycle(self._pipes)
        for request in islice(requests, AHEAD * len(self._pipes)):
            self._send(next(pipes), request)
        while self._waiting:
            answer = self._receive()
            for request in islice(requests, 1):
                self._send(next(pipes), request)
            yield answer
            if mine != self._iteration:
                raise RuntimeError("this iteration was abandoned: a newer one has begun")

    def close(self) -> None:
        """Ends the processes, which notice that their pipe is closed."""
        for pipe in self._pipes:
            pipe.close()

    def __del__(self) -> None:
        self.close()

    def _send(self, pipe: Connection, request: Request) -> None:
        with _dying():
            pipe.send(request)
        self._waiting.append(pipe)

    def _receive(self) -> Answer:
        with _dying():
            pipe = self._waiting.popleft()
            shape, labels, positions, skipped, error = pipe.recv()
            images = np.empty(shape, np.uint8)
            if images.size:
                pipe.recv_bytes_into(images.data.cast("B"))
        return Answer(images, labels, positions, skipped, error)


@contextlib.contextmanager
def _dying() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise UserError("a loader process ended unexpectedly; was it killed, or out of memory?") from error


def _widen(pipe: Connection) -> None:
    """Lets a whole batch wait in the pipe, as far as the system allows, so that the process can go on."""
    with socket.socket(fileno=socket.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)


def _serve(reader: Reader, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    with contextlib.suppress(EOFError, OSError):
        while True:
            images, *rest = reader.read(pipe.recv())
            pipe.send((images.shape, *rest))
            if images.size:
                pipe.send_bytes(images.tobytes())
