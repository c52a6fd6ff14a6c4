"""What libraries say while a model is loaded is silenced, and nothing else."""

import io
import logging
import sys
import threading
import warnings
from contextlib import ExitStack, redirect_stdout

import pytest
import transformers

from align.stages.model.loading.quiet import quiet
from support.patience import PATIENCE

LOGS = transformers.utils.logging


def settings():
    packer = logging.getLogger("bitsandbytes")
    heard = LOGS.get_verbosity(), LOGS.is_progress_bar_enabled(), packer.level
    return heard, sys.stdout, [*warnings.filters]


class Loading:
    """A thread that is quiet until it is told to end."""

    def __init__(self, says=None):
        self._says, self._inside, self._over = says, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._load)

    def _load(self):
        with quiet():
            if self._says:
                self._says()
            self._inside.set()
            assert self._over.wait(PATIENCE)

    def __enter__(self):
        self._thread.start()
        assert self._inside.wait(PATIENCE)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def says(who):
    print(who)
    warnings.warn(f"{who} warns", stacklevel=1)


def test_a_quiet_thread_is_silenced_and_the_main_one_is_heard(capsys):
    with Loading(says=lambda: says("a library")):
        with pytest.warns(UserWarning, match="main warns"):
            says("main")
        with quiet():
            says("a library, here")
        with pytest.warns(UserWarning, match="main warns"):
            says("main")
    out, err = capsys.readouterr()
    assert out.split("\n") == ["main", "main", ""]
    assert err.split("\n") == ["a library", "a library, here", ""]


def test_all_is_as_before_when_the_last_is_heard_again():
    before = settings()
    with ExitStack() as here:
        with Loading():
            here.enter_context(quiet())  # which ends after the other
            inside = settings()
        assert settings() == inside != before
    assert settings() == before
    with pytest.warns(UserWarning, match="main warns"):
        says("main")


def test_output_that_is_put_back_after_it_was_quiet_is_not_wrapped_again():
    before = sys.stdout
    with ExitStack() as other:
        with Loading():
            other.enter_context(redirect_stdout(io.StringIO()))
        other.close()
    with quiet():
        pass
    assert sys.stdout is before
