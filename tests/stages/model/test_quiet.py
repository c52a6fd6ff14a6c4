"""What libraries say while a model is loaded is silenced, also where two threads load."""

import logging
import threading
import warnings
from contextlib import ExitStack, contextmanager

import transformers

from align.stages.model.loading.quiet import quiet
from support.patience import PATIENCE

LOGS = transformers.utils.logging


def settings():
    packer = logging.getLogger("bitsandbytes")
    return (
        (LOGS.get_verbosity(), LOGS.is_progress_bar_enabled(), packer.level),
        [*warnings.filters],
    )


@contextmanager
def another_thread_inside():
    inside, over = threading.Event(), threading.Event()

    def load():
        with quiet():
            inside.set()
            assert over.wait(PATIENCE)

    thread = threading.Thread(target=load)
    thread.start()
    assert inside.wait(PATIENCE)
    yield
    over.set()
    thread.join()


def test_what_libraries_warn_of_is_silenced_and_others_are_heard(recwarn):
    with quiet():
        warnings.warn("a library", stacklevel=1)
    warnings.warn("main", stacklevel=1)
    assert [str(one.message) for one in recwarn] == ["main"]


def test_all_is_as_before_when_the_last_thread_leaves():
    before = settings()
    with ExitStack() as here:
        with another_thread_inside():
            here.enter_context(quiet())  # which ends after the other
            inside = settings()
        assert settings() == inside != before
    assert settings() == before
