"""What libraries say while a model is loaded is silenced, also where two threads load."""

import logging
import threading
import warnings

import transformers

from align.stages.model.transformers_compat import quiet
from support.patience import PATIENCE

LOGS = transformers.utils.logging


def settings():
    packer = logging.getLogger("bitsandbytes")
    return LOGS.get_verbosity(), LOGS.is_progress_bar_enabled(), packer.level, [*warnings.filters]


def test_libraries_are_silent_until_the_last_thread_leaves_and_all_is_as_before(recwarn):
    before = settings()
    inside, over = threading.Event(), threading.Event()

    def load():
        with quiet():
            inside.set()
            assert over.wait(PATIENCE)

    thread = threading.Thread(target=load)
    thread.start()
    assert inside.wait(PATIENCE)
    with quiet():  # which ends after the other
        silenced = settings()
        over.set()
        thread.join()
        assert settings() == silenced != before
        warnings.warn("a library", stacklevel=1)
    warnings.warn("main", stacklevel=1)
    assert settings() == before
    assert [str(one.message) for one in recwarn] == ["main"]
