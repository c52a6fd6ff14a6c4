"""Threads that begin the same work at the same time."""

import threading

WRITERS = 12


def at_the_same_time(work):
    """Calls the work in threads that start together, with their numbers."""
    start = threading.Barrier(WRITERS)

    def begin(writer):
        start.wait()
        work(writer)

    threads = [threading.Thread(target=begin, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
