"""What libraries say while a model is loaded is silenced, also where two threads load."""

import logging
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager

import pytest
import transformers

from align.stages.model.loading.quiet import quiet
from support.patience import PATIENCE

LOGS = transformers.utils.logging


def settings():
    packer = logging.getLogger("bitsandbytes")
    return (
        (LOGS.get_verbosity(), LOGS.is_progress_bar_enabled(), packer.level),
        sys.stdout,
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


def test_what_libraries_print_and_warn_of_is_no_result(capsys):
    with quiet():
        print("a library")
        warnings.warn("a library warns", stacklevel=1)
    with pytest.warns(UserWarning, match="main"):
        warnings.warn("main", stacklevel=1)
    print("main")
    assert capsys.readouterr() == ("main\n", "a library\n")


def test_all_is_as_before_when_the_last_thread_leaves():
    before = settings()
    with ExitStack() as here:
        with another_thread_inside():
            here.enter_context(quiet())  # which ends after the other
            inside = settings()
        assert settings() == inside != before
    assert settings() == before
