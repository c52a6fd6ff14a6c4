"""Processes that add to a folder of answers others use too; these import it by this name."""

from align.stages.storage.answers import Answers
from support import disk_faults

LIVES, STEPS = 5, 6


def killed_as_it_adds(folder, faults):
    """Adds two answers at a time until its disk kills it."""
    disk_faults.arm(faults)
    answers = Answers(folder)
    for first, second in ("ab", "cd", "ef"):
        answers.add({key: {"text": key} for key in (first, second)})


def pays(folder, own, log):
    """Asks for what is missing, in several lives that each begin with what is stored."""
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
