"""Reading ahead: while one tensor is put in its place, the next ones are read already."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from metaviz.core.stored import THREADS, Stored

# What may be read and not yet used. Enough for the threads to be busy, and little next to any model.
_LIMIT = 64 * 2**20


class Ahead:
    """Reads stored tensors in an order that is known before; a context, at whose end no thread is left.

    Fresh memory is slow to get, so two threads with a tensor each take half the time of one.

    Args:
        order: What will be wanted, in this order.
    """

    def __init__(self, order: Iterable[Stored]) -> None:
        self._waiting = deque(order)
        self._reading: dict[int, Future[torch.Tensor]] = {}
        self._nbytes = 0
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="metaviz-read")

    def load(self, stored: Stored) -> torch.Tensor:
        """The next tensor, as :meth:`Stored.load` gives it, and raising what it raises."""
        self._go_on()
        future = self._reading.pop(id(stored), None)
        if future is None:
            return stored.load()
        self._nbytes -= stored.nbytes
        self._go_on()
        return future.result()

    def _go_on(self) -> None:
        while self._waiting:
            stored = self._waiting[0]
            if self._reading and self._nbytes + stored.nbytes > _LIMIT:
                return
            self._waiting.popleft()
            # What is in memory already takes no reading, and large ones are read by several threads themselves.
            if stored.pieces and stored.nbytes <= _LIMIT:
                self._nbytes += stored.nbytes
                self._reading[id(stored)] = self._pool.submit(stored.load, self._stop)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        # The threads write to memory that is given back when this is left.
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
