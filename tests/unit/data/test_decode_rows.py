"""Every row becomes one record or one rejection with its reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.rows import Role
from align.stages.data.row_parts import shared_length
from support.read_rows import bot, read_lines, record_of, rejection_of, user

PAIRED = {"prompt": "p", "chosen": "c", "rejected": "r"}
UNPAIRED = {"prompt": "p", "completion": "c", "label": True}
SCORED = {"prompt": "p", "completions": ["a", "b", "c"], "scores": [1, 0.5, -2]}
LONG = {"prompt": "p", "completion": "c", "score": 3}
PREFILLED = [user("p"), bot("Sure,")]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
CHAT = {"prompt": [user("p")], "chosen": [bot("c")], "rejected": [bot("r")]}
STEER = {"prompt": "p", "response_1": "c", "response_2": "r", "preference_strength": -2}


@pytest.mark.parametrize(
    ("columns", "scores"),
    [
        ({"score_chosen": "7.5", "score_rejected": 3}, (7.5, 3.0)),
        ({"chosen_score": 1, "rejected_score": None}, (1.0, None)),
    ],
)
def test_scores_of_a_pair_may_be_text_or_missing(columns, scores):
    record = record_of(PAIRED | columns)
    assert (record.file, record.row, record.is_conversation) == (0, 0, False)
    assert (record.prompt, record.completions, record.scores) == ("p", ("c", "r"), scores)


def test_labels_say_whether_a_completion_is_desirable():
    for label in (True, 1, 1.0, "true", "TRUE", "desirable", "1", " True "):
        assert record_of(UNPAIRED | {"label": label}).roles == (Role.DESIRABLE,), label
    for label in (False, 0, 0.0, "False", "undesirable", "Undesirable", "0"):
        assert record_of(UNPAIRED | {"label": label}).roles == (Role.UNDESIRABLE,), label


def test_a_conversation_keeps_its_messages_and_loses_their_nulls():
    record = record_of(CHAT | {"prompt": [user("p") | {"name": None, "id": 3}]})
    assert record.prompt == (user("p") | {"id": 3},)
    assert record.completions == ((bot("c"),), (bot("r"),))
    record = record_of({"prompt": [user("p")], "completions": ["a", [bot("b")]], "scores": [1, 2]})
    assert record.completions == ((bot("a"),), (bot("b"),))
    record = record_of(CHAT | {"chosen": [CALL], "rejected": [bot("r") | {"tool_calls": []}]})
    called = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert record.completions == ((called,), (bot("r"),))


def test_the_names_that_sharegpt_has_for_who_speaks_are_read_as_roles():
    row = {
        "prompt": [{"from": "system", "value": "s"}, {"from": "human", "value": "p"}],
        "chosen": [{"from": "gpt", "value": "c", "id": 1}],
        "rejected": [{"role": "gpt", "content": "r"}],
    }
    record = record_of(row)
    assert record.prompt == ({"role": "system", "content": "s"}, user("p"))
    assert record.completions == ((bot("c") | {"id": 1},), (bot("r"),))


def test_text_that_merely_looks_like_json_stays_text():
    for text in (
        "[1] is a footnote",
        "[]",
        "[{placeholder}] stays",
        '[{"name": "Ann", "role": "admin"}]',
        '[{"from": "Paris", "to": "Rome"}]',
        '[{"role": "user", "content": "hi"}] is how it begins.',
        "{not json}",
    ):
        assert record_of(PAIRED | {"chosen": text}).completions == (text, "r")
        assert record_of(CHAT | {"chosen": text}).completions[0] == (bot(text),)


def test_shared_messages_are_the_prompt_up_to_a_whole_turn():
    def prompt_of(common, *ends):
        chosen, rejected = ([*common, *end] for end in ends)
        record = record_of({"chosen": chosen, "rejected": rejected})
        assert [[*record.prompt, *rest] for rest in record.completions] == [chosen, rejected]
        return record.prompt

    common = [user("a"), bot("b")]
    assert prompt_of([*common, user("c")], [bot("d")], [bot("e")]) == (*common, user("c"))
    assert prompt_of(common, [bot("d")], [bot("e")]) == (user("a"),)
    assert prompt_of(common, [user("c"), bot("d")], [user("e")]) == tuple(common)


@pytest.mark.parametrize("rest", ["rest", [bot("rest")]])
def test_a_prompt_may_end_with_the_beginning_of_the_answer(rest):
    prefilled = [user("p"), bot("Sure, ")]
    record = record_of(CHAT | {"prompt": prefilled, "chosen": rest, "rejected": "no"})
    assert record.prompt == tuple(prefilled)
    assert record.completions == ((bot("rest"),), (bot("no"),))


@given(st.text("ab \n", max_size=12), st.text("ab \n", max_size=12))
def test_the_implicit_prompt_is_the_longest_that_ends_before_a_blank(chosen, rejected):
    def is_boundary(at):
        rests = chosen[at:], rejected[at:]
        ends_a_word = at == 0 or not chosen[at - 1].isspace()
        return chosen[:at] == rejected[:at] and ends_a_word and all(r[:1].isspace() for r in rests)

    lengths = range(1, min(len(chosen), len(rejected)))
    longest = max(filter(is_boundary, lengths), default=0)
    expected = len(chosen) if chosen == rejected else longest
    assert shared_length(chosen, rejected) == expected


def test_system_tools_and_options_may_be_json_text():
    described = {"type": "function", "function": {"name": "f"}}
    tools, options = [described, {"name": "g"}], {"thinking": False}
    for given_tools, given_options in [
        (tools, options),
        (json.dumps(tools), json.dumps(options)),
        ([json.dumps(described), {"name": "g"}], options),
    ]:
        columns = {"tools": given_tools, "chat_template_kwargs": given_options}
        record = record_of(CHAT | columns | {"system": "Be kind."})
        assert record.prompt == ({"role": "system", "content": "Be kind."}, user("p"))
        assert (record.tools, record.template_options) == (tuple(tools), options)
    record = record_of(CHAT | {"system": "", "tools": [], "chat_template_kwargs": None})
    assert (record.prompt, record.tools, record.template_options) == ((user("p"),), None, {})


def test_columns_are_carried_renamed_and_seen_however_late():
    records, _ = read_lines(CHAT, CHAT | {"system": "late"}, columns=CHAT)
    assert [len(record.prompt) for record in records] == [1, 2]
    bad = rejection_of(PAIRED, columns=("chosen", "rejected"))  # the first rows have no prompt
    assert (bad.reason, "'prompt'" in bad.detail) == ("schema", True)
    row = PAIRED | {"margin": 2, "weight": "0.5", "length": 7, "other": 1}
    assert record_of(row, carry=["length"]).carried == {"margin": 2.0, "weight": 0.5, "length": 7.0}
    row, mapped = {"question": "p", "chosen": "c", "rejected": "r"}, {"prompt": "question"}
    assert record_of(row, mapped=mapped).prompt == "p"
    assert "'question'" in rejection_of(row | {"question": ""}, mapped=mapped).detail


def test_marks_of_learned_messages_are_kept_apart():
    several = [bot("a") | {"loss": False}, user("b"), bot("c") | {"weight": 1}]
    record = record_of(CHAT | {"prompt": [user("p") | {"loss": 0}], "chosen": several})
    assert record.prompt == (user("p"),)
    assert record.completions == ((bot("a"), user("b"), bot("c")), (bot("r"),))
    assert record.learned == ((False, True, True), None)
    assert record_of(CHAT).learned == ()


ASKED = user("p")
REFUSED = [
    (PAIRED | {"chosen": None}, "schema", "'chosen'"),
    (SCORED | {"scores": [1, None, 2]}, "schema", "'scores[1]'"),
    (SCORED | {"completions": ["a", None, "b"]}, "schema", "'completions[1]'"),
    (SCORED | {"completions": None}, "schema", "'completions'"),
    (PAIRED | {"chosen": 3}, "schema", "'chosen'"),
    (PAIRED | {"chosen": ["c"]}, "schema", "'chosen[0]'"),
    (CHAT | {"chosen": [{"speaker": "gpt", "value": "c"}]}, "schema", "'role'"),
    (CHAT | {"chosen": [bot("c") | {"tool_calls": "[]"}]}, "schema", "'tool_calls'"),
    (CHAT | {"chosen": [bot("") | {"function_call": {"name": "f"}}]}, "schema", "'function_call'"),
    (CHAT | {"chosen": [bot([{"type": "text"}])]}, "schema", "'content'"),
    (CHAT | {"chosen": [bot([{"type": "image_url"}])]}, "schema", "'image_url'"),
    (CHAT | {"prompt": "p"}, "schema", "'chosen'"),
    (CHAT | {"prompt": [bot("s"), ASKED], "chosen": [ASKED, bot("c")]}, "schema", "'chosen'"),
    (CHAT | {"prompt": PREFILLED, "chosen": "Sure, yes"}, "schema", "'chosen'"),
    (CHAT | {"prompt": [user("p"), bot(" ")]}, "empty_prompt", "assistant"),
    (CHAT | {"prompt": [user("p"), CALL]}, "schema", "'chosen'"),
    (PAIRED | {"prompt": "[{'role': 'user', 'content': 'p'}]"}, "schema", "'prompt'"),
    (PAIRED | {"prompt": '[{"role": "user", "content": "p"}, {"role": "a'}, "schema", "'prompt'"),
    (PAIRED | {"system": "s"}, "schema", "'system'"),
    (CHAT | {"prompt": [{"role": "system", "content": "x"}], "system": "s"}, "schema", "'system'"),
    (CHAT | {"system": 3}, "schema", "'system'"),
    (CHAT | {"tools": "[{"}, "schema", "'tools'"),
    (CHAT | {"tools": {"name": "f"}}, "schema", "'tools'"),
    (CHAT | {"chat_template_kwargs": [1]}, "schema", "'chat_template_kwargs'"),
    (SCORED | {"scores": [1, 2]}, "schema", "'scores'"),
    ({"chosen": "a b", "rejected": [bot("c")]}, "schema", "rejected"),
    (PAIRED | {"prompt": " \n\t"}, "empty_prompt", "'prompt'"),
    ({"chosen": "a b", "rejected": "c d"}, "empty_prompt", "'chosen'"),
    (CHAT | {"rejected": [bot("")]}, "empty_completion", "'rejected'"),
    (SCORED | {"completions": [], "scores": []}, "empty_completion", "'completions'"),
    (SCORED | {"completions": ["a", "", "c"]}, "empty_completion", "'completions[1]'"),
    ({"chosen": "same text", "rejected": "same text"}, "empty_completion", "'chosen'"),
    ({"chosen": [ASKED, bot("b")], "rejected": [ASKED]}, "empty_completion", "'rejected'"),
    (UNPAIRED | {"label": "yes"}, "schema", "'yes'"),
    (UNPAIRED | {"label": float("nan")}, "schema", "nan"),
    (LONG | {"score": "high"}, "schema", "'high'"),
    (LONG | {"score": 10**400}, "schema", "'score'"),
    (SCORED | {"scores": [1, 2, float("inf")]}, "schema", "'scores[2]'"),
    (PAIRED | {"prompt": "a\ud800"}, "schema", "'prompt'"),
    (CHAT | {"chosen": [bot("\udc00")]}, "schema", "'chosen'"),
    # Public sets
    (STEER | {"prompt": "p\n<extra_id_1>Assistant\nc"}, "schema", "'prompt'"),
    (STEER | {"preference_strength": 0}, "tie", "response_1"),
    ({"messages": [ASKED, bot("c")], "chosen": bot("c"), "rejected": "r"}, "schema", "'messages'"),
    ({"messages": [ASKED], "rejected_response": "r"}, "schema", "'messages'"),
    ({"messages": [bot("c")], "label": 1}, "empty_prompt", "'messages'"),
    ({"messages": [ASKED, bot("a"), bot("c")], "label": 1}, "schema", "'messages'"),
    ({"instruction": "p", "completions": [{"response": "c"}]}, "schema", "completions"),
    ({"prompt": "p", "answers": [{"answer": "c", "rank": None}]}, "schema", "answers"),
    ({"context": [ASKED], "completions": [{"completion": "c", "rank": 1}]}, "schema", "rank"),
]


@pytest.mark.parametrize(("row", "reason", "column"), REFUSED)
def test_what_cannot_be_used_has_a_reason_and_names_its_column(row, reason, column):
    rejected = rejection_of(row)
    assert (rejected.reason, rejected.row) == (reason, 0)
    assert column in rejected.detail


def test_a_line_that_is_not_a_row_is_rejected_and_the_next_is_read():
    for line, reason in (
        (b'{"prompt": "p", "chosen"', "schema"),
        (b"[1, 2]", "schema"),
        (b"null", "schema"),
        (b"[" * 100_000, "schema"),
        (b"1" * 5000, "schema"),
        (b'{"prompt": "\xff", "chosen": "c", "rejected": "r"}', "schema"),
        (b"\x00\x00\x00", "schema"),
        (b"{}", "schema"),
    ):
        records, rejected = read_lines(PAIRED, line, PAIRED)
        assert [record.row for record in records] == [0, 2]
        assert [(bad.row, bad.reason) for bad in rejected] == [(1, reason)], line[:40]


def test_details_are_short_and_printable():
    for value in ("yes\x1b[31m\u202e\n" * 5000, {"a": ["x" * 10_000]}, "\ud800" * 100):
        detail = rejection_of(UNPAIRED | {"label": value}).detail
        assert len(detail) < 160
        assert detail.isprintable()
