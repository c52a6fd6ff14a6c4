"""What processes do with a folder of answers that others use too; these import it by this name."""

import itertools
import os
import signal
from unittest import mock

from align.stages.storage import answers as module
from align.stages.storage.answers import Answers
from align.stages.storage.disk.disk_store import DiskStore


def line(key, text):
    return b'{"answer":{"text":"%s"},"key":"%s"}\n' % (text.encode(), key.encode())


def merges(folder, kill):
    """Six small segments into two, killed at a failpoint or before a removal."""
    module.MOST_SMALL = 0
    module.SMALL_BYTES = module.MERGED_BYTES = 3 * len(line("a", "a"))
    if isinstance(kill, str):
        name, _, visit = kill.partition("@")
        os.environ["ALIGN_FAILPOINTS"] = f"{name}=kill@{visit or 1}"
    answers, remove, visits = Answers(folder), DiskStore.remove, itertools.count(1)

    def removed(path):
        if next(visits) == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        remove(path)

    with mock.patch.object(DiskStore, "remove", side_effect=removed):
        answers.merge()


LIVES, STEPS = 5, 6


def pays(folder, own, log):
    """Asks for what is missing, in several lives that each begin with what is stored."""
    module.MOST_SMALL, module.SMALL_BYTES, module.MERGED_BYTES = 0, 300, 900
    for life in range(1, LIVES + 1):
        answers = Answers(folder)
        for key in own[: life * STEPS]:
            if answers.missing([key]):
                with log.open("a") as paid:
                    paid.write(f"{key}\n")
                answers.add({key: {"text": f"of {key}"}, "of all": {"text": own[0]}})
                answers.look()
            assert dict(answers.of([key])) == {key: {"text": f"of {key}"}}
        read = dict(answers.of(own[: life * STEPS]))
        assert read == {key: {"text": f"of {key}"} for key in own[: life * STEPS]}


def merges_until(folder, stop):
    module.MOST_SMALL, module.SMALL_BYTES, module.MERGED_BYTES = 0, 300, 900
    while not stop.is_set():
        Answers(folder).merge()
