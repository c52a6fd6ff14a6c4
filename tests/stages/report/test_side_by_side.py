"""Answers side by side are read back as they were written."""

from align.schemas.errors import CorruptionError
from align.stages.report.side_by_side import Answered, answers_jsonl, read_answers
from support.refusals import refuses

TEXTS = ("a\n\n# A heading\n\n> three", "</pre><img src=x>", '"quoted" \\ \u2028 é')


def test_answers_are_read_back_and_what_is_no_answer_is_refused(tmp_path):
    path, answers = (
        tmp_path / "answers.jsonl",
        tuple(
            Answered("abcdef", text, text, text, before_ended=True, after_ended=False)
            for text in TEXTS
        ),
    )
    path.write_bytes(answers_jsonl(answers))
    assert read_answers(path) == answers
    path.write_text('{"prompt": "a"}\n')
    with refuses(CorruptionError, path):
        read_answers(path)
