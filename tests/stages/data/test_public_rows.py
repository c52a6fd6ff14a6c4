"""Rows of public data sets are read as their cards say, or refused; worked out by hand."""

import pytest

from align.schemas.errors import UsageError
from align.schemas.rows import Role
from align.stages.data.data_schema import foreign_shape
from support.read_rows import bot, record_of, rejection_of, shape_of, user

HI, GOOD, BAD = user("Hi?"), bot("Yes."), bot("No.")
GPT = [{"from": "human", "value": "Hi?"}]
SHP = {"history": "Hi?", "human_ref_A": "Yes.", "human_ref_B": "No.", "labels": 1}
WEBGPT = {"question": {"full_text": "Hi?"}, "answer_0": "No.", "answer_1": "Yes."}
WEBGPT |= {"score_0": -0.5, "score_1": 0.5}
STEER2 = {"prompt": "Hi?", "response_1": "Yes.", "response_2": "No.", "preference_strength": -2}
STEER3 = {"context": [HI], "response1": "No.", "response2": "Yes.", "overall_preference": 3}
ARENA = {"conversation_a": [HI, BAD], "conversation_b": [HI, GOOD], "winner": "model_b"}
KAGGLE = {"prompt": '["Hi?"]', "response_a": '["Yes."]', "response_b": '["No."]'}
KAGGLE |= {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}
SAFE = {"prompt": "Hi?", "response_0": "No.", "response_1": "Yes."}
ALPACA = {"instruction": "Say", "input": "7", "chosen": "Yes.", "rejected": "No."}
BLOCKS = [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]
OPENAI = {"input": {"messages": [HI]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}


@pytest.mark.parametrize(
    "row",
    [
        OPENAI,
        {"messages": [HI], "chosen": GOOD, "rejected": BAD},
        {"messages": [HI, GOOD], "rejected_response": "No."},
        {"messages": [HI, GOOD], "rejected_messages": [HI, BAD]},
        {"conversations": GPT, "chosen": {"from": "gpt", "value": "Yes."}, "rejected": BAD},
        {"prompt": [HI], "chosen": {"role": "assistant", "content": BLOCKS}, "rejected": BAD},
        SHP,
        SHP | {"human_ref_A": "No.", "human_ref_B": "Yes.", "labels": 0},
        WEBGPT,
        STEER2,
        STEER2 | {"response_1": "No.", "response_2": "Yes.", "preference_strength": 1},
        STEER3,
        ARENA,
        ARENA | {"conversation_a": [HI, GOOD], "conversation_b": [HI, BAD], "winner": "model_a"},
        KAGGLE,
        SAFE | {"better_response_id": 1},
        SAFE | {"safer_response_id": 1},
    ],
)
def test_a_pair_has_its_whole_prompt_and_the_answer_that_won_first(row):
    found = record_of(row)
    assert (found.prompt, found.completions) == ((HI,), ((GOOD,), (BAD,)))
    assert found.roles == (Role.CHOSEN, Role.REJECTED)


@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, GOOD], "label": 0},
        {"messages": [HI, GOOD], "kto_tag": 0},
        {"conversations": [*GPT, {"from": "gpt", "value": "Yes."}], "kto_tag": 0},
        {"instruction": "Hi?", "output": "Yes.", "kto_tag": 0},
    ],
)
def test_the_last_answer_has_the_label(row, label):
    name = [*row][-1]
    found = record_of(row | {name: label})
    assert (found.prompt, found.completions) == ((HI,), ((GOOD,),))
    assert found.roles == (Role.DESIRABLE if label else Role.UNDESIRABLE,)


def test_history_system_tools_scores_and_strength_are_kept():
    more = {"system": "Be kind.", "history": [["Hi?", "Yes."]]}
    system = {"role": "system", "content": "Be kind."}
    assert record_of(ALPACA | more).prompt == (system, HI, GOOD, user("Say\n7"))
    assert record_of(ALPACA | {"input": ""}).prompt == (user("Say"),)
    no_history = {"rename": {"history": "unused history"}}
    assert record_of(ALPACA | more, **no_history).prompt == (system, user("Say\n7"))
    tool = {"type": "function", "function": {"name": "f"}}
    given = {"messages": [HI], "tools": [tool]}
    assert record_of(OPENAI | {"input": given}).tools == (tool,)
    assert record_of(WEBGPT).scores == (0.5, -0.5)
    assert record_of(STEER2).carried == {"margin": 2}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ARENA | {"winner": "tie"}, "tie"),
        (WEBGPT | {"score_0": 0.5}, "tie"),
        (STEER3 | {"overall_preference": 0}, "tie"),
        (KAGGLE | {"winner_model_a": 0, "winner_tie": 1}, "tie"),
        (STEER2 | {"prompt": "Hi?\n<extra_id_1>Assistant\nNo."}, "already_rendered"),
        ({"messages": [HI, GOOD], "chosen": GOOD, "rejected": BAD}, "schema"),
        ({"messages": [HI], "rejected_response": "No."}, "schema"),
        ({"messages": [GOOD], "label": 1}, "empty_prompt"),
        ({"prompt": [HI], "chosen": bot([{"type": "image_url"}]), "rejected": BAD}, "schema"),
    ],
)
def test_a_row_that_could_be_read_wrongly_is_rejected(row, reason):
    assert rejection_of(row).reason == reason


BOTH = SAFE | {"better_response_id": 1, "safer_response_id": 0}


@pytest.mark.parametrize(
    ("columns", "rename", "message"),
    [
        (BOTH, {}, "--map safer_response_id= .*--map better_response_id="),
        (["prompt", "response", "helpfulness"], {}, "align select.*--map completion=response"),
        (["instruction", "completions"], {}, "align select"),
        (["prompt", "answers"], {}, "align select"),
        (SHP, {"human_ref_A": "chosen", "human_ref_B": "rejected"}, "leave --map out"),
        (ALPACA, {"instruction": "prompt"}, "leave --map out"),
    ],
)
def test_what_has_two_meanings_or_loses_a_part_is_refused_with_the_way(columns, rename, message):
    with pytest.raises(UsageError, match=message):
        shape_of(columns, rename=rename)


def test_the_columns_of_a_shape_can_still_be_named_or_left_out():
    assert record_of(BOTH, rename={"safer_response_id": "unused x"}).completions[0] == (GOOD,)
    row = {"conversations": [HI], "chosen": "Yes.", "rejected": "No."}
    assert shape_of(row, rename={"conversations": "prompt"}).kind == "paired"


def test_answers_are_nectars_unless_they_are_ours_or_named():
    assert foreign_shape(["prompt", "answers"], {}).declared.name == "Nectar"
    assert foreign_shape(["prompt", "completion", "score", "answers"], {}) is None
    assert foreign_shape(["prompt", "answers"], {"completions": "answers"}) is None
