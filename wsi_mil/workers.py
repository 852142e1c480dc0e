"""Work spread over processes that may die: the loss of one costs its own item at most, never the run."""

import ctypes
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

_PR_SET_PDEATHSIG = 1

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_in_processes(
    function: Callable[[Job], Result], jobs: Iterable[Job], *, workers: int, start: Callable[[], None] | None = None
) -> Iterator[tuple[Job, Result | None]]:
    """Yield each job with its result as they come; None where the process that worked on it was killed, twice.

    A process that the system kills (out of memory, say) takes its pool along. Its jobs are tried again one at a time,
    so that only the one at fault is lost; the others go on in a new pool. `function`, `start` (called once in each
    process) and jobs are pickled; an exception in `function` is raised here. Ctrl-C ends it after the jobs at work.
    """
    queue, suspects = deque(jobs), list[Job]()
    while queue:
        for job, result in _one_pool(function, queue, workers, start):
            if result is None:
                suspects.append(job)
            else:
                yield job, result
    for job in suspects:
        yield from _one_pool(function, deque([job]), 1, start)


def _one_pool(
    function: Callable[[Job], Result], queue: deque[Job], workers: int, start: Callable[[], None] | None
) -> Iterator[tuple[Job, Result | None]]:
    """Take jobs off `queue` until it is empty or the pool breaks. What is lost with the pool comes with None.

    No more jobs are handed out than there are workers, so the lost ones are those that were being worked on.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_process, initargs=(start,))
    running: dict[Future[Result], Job] = {}
    broken = False
    try:
        while running or (queue and not broken):
            while queue and not broken and len(running) < workers:
                try:
                    future = pool.submit(function, queue[0])
                except BrokenProcessPool:
                    broken = True
                else:
                    running[future] = queue.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                broken = broken or isinstance(future.exception(), BrokenProcessPool)
                yield job, None if isinstance(future.exception(), BrokenProcessPool) else future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_process(start: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent alone decides what it means
    _die_with_parent()
    if start is not None:
        start()


def _die_with_parent() -> None:
    """Where the system can (Linux): a parent that was killed leaves no process behind that works on."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
