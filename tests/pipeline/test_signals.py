"""A request to stop is heard wherever it arrives, and costs nothing but the unit at hand."""

import os
import signal
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from align.pipeline.executor import Share
from align.schemas.config import DataOptions
from align.schemas.errors import Interrupted
from support.patience import PATIENCE
from support.stage_one import Gate, child, contents, run


def test_a_stopped_part_leaves_its_work_for_the_others(config, clean, tmp_path):
    gate = Gate()
    said = tmp_path / "said"
    stopped = child(config, share=Share(2, 2), reference=gate.reference(), stderr=said)
    assert gate.reached.wait(PATIENCE)
    os.kill(stopped.pid, signal.SIGTERM)
    stopped.join(PATIENCE)
    assert stopped.exitcode == 143
    assert said.read_text() == "Interrupted by signal 15. Continue with the same command.\n"
    assert run(config, share=Share(1, 2)).whole is None
    assert run(config, share=Share(2, 2)).has_published
    assert contents(config.cache.output) == clean


def test_a_signal_inside_a_chat_template_is_not_taken_for_a_bad_row(
    config, data, tmp_path, monkeypatch
):
    """Whatever a template raises makes its row bad; a signal is not of the template's making."""
    chat = replace(config, data=DataOptions(files=[str(data.paired_chat)], max_bad_frac=0.1))
    run(replace(chat, cache=replace(chat.cache, output=str(tmp_path / "clean"))))
    calls = []

    def interrupted(*_, **__):
        calls.append(1)
        raise Interrupted(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "apply_chat_template", interrupted)
        with pytest.raises(Interrupted):
            run(chat)
    assert len(calls) == 1
    run(chat)
    assert contents(config.cache.output) == contents(tmp_path / "clean")


def test_an_interruption_passes_every_handler_of_errors():
    assert not issubclass(Interrupted, Exception)
    assert [Interrupted(number).exit_code for number in (2, 15)] == [130, 143]
