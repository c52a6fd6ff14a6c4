"""Every shape of rows, as public data sets and trainers write it: what it becomes, or its refusal.

The rows that are wanted were written down from each format's definition.
"""

from dataclasses import dataclass, field, replace

import pytest

from align.schemas.errors import UsageError
from align.schemas.rows import Role
from align.stages.data.cells import UNWRAPPED, Wrapping
from align.stages.data.columns import common_shape, require_scores
from align.stages.data.files import open_inputs
from align.stages.data.text_rows import read_prompts, read_text_rows
from support.read_rows import bot, parted, user, write_rows

ASKED, GOOD, BAD = "Which is larger, 7 or 9?", "9 is larger.", "I do not know, ask someone else."
HI, YES, NO = user(ASKED), bot(GOOD), bot(BAD)
WHOLE = {"chosen": [HI, YES], "rejected": [HI, NO]}
WHY = "The first answer names the larger number, and the second one does not even try to."

# Public sets by name, as their cards describe them: a row of the training data.
ROWS = {
    "HuggingFaceH4/ultrafeedback_binarized": {
        "prompt": ASKED,
        "prompt_id": "0f2e",
        **WHOLE,
        "messages": [HI, YES],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    },
    "Anthropic/hh-rlhf": {
        "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {BAD}",
    },
    "argilla/ultrafeedback-binarized-preferences-cleaned": {
        "source": "evol_instruct",
        "prompt": ASKED,
        **WHOLE,
        "chosen-rating": 5.0,
        "chosen-model": "one",
        "rejected-rating": 2.0,
        "rejected-model": "two",
    },
    "argilla/dpo-mix-7k": {
        "dataset": "argilla/distilabel-capybara",
        **WHOLE,
        "chosen_rating": 5.0,
        "chosen_model": "one",
        "rejected_rating": 2.0,
        "rejected_model": "two",
    },
    "stanfordnlp/SHP": {
        "post_id": "hi6r",
        "domain": "askmath_train",
        "upvote_ratio": 0.9,
        "history": ASKED,
        "c_root_id_A": "a1",
        "c_root_id_B": "b1",
        "created_at_utc_A": 1636000000,
        "created_at_utc_B": 1636000100,
        "score_A": 42,
        "score_B": 7,
        "human_ref_A": GOOD,
        "human_ref_B": BAD,
        "labels": 1,
        "seconds_difference": 100.0,
        "score_ratio": 6.0,
    },
    "nvidia/HelpSteer2": {  # preference/preference.jsonl.gz
        "split": "train",
        "prompt": ASKED,
        "response_1": BAD,
        "response_2": GOOD,
        "preference_strength": 2,
        "preference_statement": "Response 2 is better than Response 1.",
        "preference_elaboration": WHY,
        "three_most_similar_preferences": [{"statement": WHY, "elaboration": WHY, "strength": 2}],
        "all_preferences_unprocessed": [{"statement": WHY, "elaboration": WHY, "strength": 2}],
    },
    "nvidia/HelpSteer3": {
        "domain": "general",
        "language": "english",
        "context": [HI],
        "response1": GOOD,
        "response2": BAD,
        "overall_preference": -2,
        "individual_preference": [{"score": -2, "reasoning": WHY, "feedback1": WHY}],
    },
    "PKU-Alignment/PKU-SafeRLHF": {
        "prompt": ASKED,
        "response_0": BAD,
        "response_1": GOOD,
        "prompt_source": "One",
        "is_response_0_safe": True,
        "is_response_1_safe": True,
        "better_response_id": 1,
        "safer_response_id": 1,
        "response_0_sha256": "0f",
        "response_1_sha256": "1f",
    },
    "openai/webgpt_comparisons": {
        "question": {"dataset": "eli5", "id": "a1", "full_text": ASKED},
        "quotes_0": {"title": ["Numbers"], "extract": [WHY]},
        "answer_0": BAD,
        "tokens_0": {"prefix": [1, 2], "completion": [3]},
        "score_0": -1.0,
        "quotes_1": {"title": ["Numbers"], "extract": [WHY]},
        "answer_1": GOOD,
        "tokens_1": {"prefix": [1, 2], "completion": [3]},
        "score_1": 1.0,
    },
    "trl-lib/kto-mix-14k": {"prompt": [HI], "completion": [YES], "label": True},
    "mlabonne/orpo-dpo-mix-40k": {
        "source": "Airoboros",
        **WHOLE,
        "prompt": ASKED,
        "question": ASKED,
    },
    "openbmb/UltraInteract_pair": {
        "task": "Math",
        "dataset": "one",
        "trajectory": [{"from": "user", "value": ASKED}],
        "chosen": GOOD,
        "rejected": BAD,
        "id": "0f",
        "parent_id": "-1",
    },
}

SYSTEM = {"role": "system", "content": "Be brief."}
PAST = (user("Hello there."), bot("Good day to you."))
ANSWERS = {"chosen": f" {GOOD}", "rejected": f" {BAD}"}


def gpt(*messages):
    """Messages as ShareGPT has them."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[one["role"]], "value": one["content"]} for one in messages]


def blocks(message, *more):
    """A message whose content is a list of blocks."""
    return {**message, "content": [{"type": "text", "text": message["content"]}, *more]}


def pair(prompt=(HI,), chosen=(YES,), rejected=(NO,), scores=(None, None), **carried):
    roles = (Role.CHOSEN, Role.REJECTED)
    return (prompt, (chosen, rejected), roles, scores, carried)


def label(is_good, prompt=(HI,), answer=(YES,), **carried):
    role = Role.DESIRABLE if is_good else Role.UNDESIRABLE
    return (prompt, (answer,), (role,), (None,), carried)


def scored(prompt, *answers):
    """A prompt whose answers have scores."""
    texts, scores = zip(*answers, strict=True)
    return (prompt, texts, (Role.CANDIDATE,) * len(texts), scores, {})


CHAT = pair()
TEXT = pair(ASKED, f" {GOOD}", f" {BAD}")
BARE = pair(ASKED, GOOD, BAD)


@dataclass
class Case:
    """A file, and the rows that it becomes, or what its refusal names."""

    name: str
    rows: list
    wanted: list = field(default_factory=list)  # with these names of columns; none: refused
    names: tuple = ()  # in the refusal of the file as it is; none: it is read as it is
    mapped: dict = field(default_factory=dict)
    wrap: Wrapping = UNWRAPPED
    ties: int = 0
    ending: str = "jsonl"


def taken(name, *rows, wanted=(CHAT,), **more):
    return Case(name, [*rows], [*wanted], **more)


def mapped(name, *rows, to, names=(), wanted=(CHAT,), **more):
    return Case(name, [*rows], [*wanted], tuple(names) or tuple(rows[0]), to, **more)


def refused(name, *rows, names=(), **more):
    return Case(name, [*rows], [], tuple(names) or tuple(rows[0]), **more)


OPENAI = {"input": {"messages": [HI]}, "preferred_output": [YES], "non_preferred_output": [NO]}
ORCA = {"system": SYSTEM["content"], "question": ASKED, "chosen": GOOD, "rejected": BAD}
SAFE = {"prompt": ASKED, "response_0": BAD, "response_1": GOOD}
SAFE |= {"is_response_0_safe": True, "is_response_1_safe": True}
STEER2 = {"prompt": ASKED, "response_1": GOOD, "response_2": BAD, "preference_strength": -2}
ARENA = {"question_id": "a1", "model_a": "x", "model_b": "y", "winner": "model_b"}
ARENA |= {"conversation_a": [HI, NO], "conversation_b": [HI, YES], "language": "English"}
KAGGLE = {"id": 30192, "prompt": f'["{ASKED}"]', "response_a": f'["{GOOD}"]'}
KAGGLE |= {"response_b": f'["{BAD}"]', "winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}
WEBGPT = {"question": {"full_text": ASKED, "dataset": "eli5"}, "answer_0": BAD, "answer_1": GOOD}
SHP = {"history": ASKED, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1, "score_A": 52}
ALPACA = {"instruction": "Which is larger?", "input": "7 or 9", "chosen": GOOD, "rejected": BAD}
JOINED = (user("Which is larger?\n7 or 9"),)
FARM = {"instruction": "Which is larger?", "input": "7 or 9", "output_1": BAD, "output_2": GOOD}
HUMAN = f"\n\nHuman: {ASKED}\n\nAssistant:"
IMAGE = {"type": "image"}
BINARIZED = {"prompt": ASKED, "prompt_id": "f0e3", **WHOLE}
RANKED = [{"answer": GOOD, "model": "a", "rank": 1.0}, {"answer": BAD, "model": "b", "rank": 2.0}]
OVERALL = {"response": BAD, "fine-grained_score": None, "overall_score": 2.0}
RATED = {"response": GOOD, "model": "a", "fine-grained_score": 4.75, "overall_score": 9.0}
NEMO = {"context": [HI]}

# What rows of public sets become; the others become CHAT.
WANTED = {
    "HuggingFaceH4/ultrafeedback_binarized": pair(scores=(8.5, 3.0)),
    "Anthropic/hh-rlhf": pair(HUMAN, f" {GOOD}", f" {BAD}"),
    "nvidia/HelpSteer2": pair(margin=2.0),
    "nvidia/HelpSteer3": pair(margin=2.0),
    "openai/webgpt_comparisons": pair(scores=(1.0, -1.0)),
    "trl-lib/kto-mix-14k": label(True),
}
PUBLIC = [
    taken(f"{name} in {ending}", row, wanted=[WANTED.get(name, CHAT)], ending=ending)
    for name, row in ROWS.items()
    for ending in ("jsonl", "parquet")
]
FILES = [
    *PUBLIC,
    # TRL
    taken("trl text", {"prompt": ASKED, **ANSWERS}, wanted=[TEXT]),
    taken("trl chat", {"prompt": [HI], "chosen": [YES], "rejected": [NO]}),
    taken(
        "trl implicit prompt of text",
        {"chosen": f"{ASKED} {GOOD}", "rejected": f"{ASKED} {BAD}"},
        wanted=[TEXT],
    ),
    taken(
        "trl label",
        {"prompt": ASKED, "completion": f" {GOOD}", "label": True},
        {"prompt": ASKED, "completion": f" {BAD}", "label": False},
        wanted=[label(True, ASKED, f" {GOOD}"), label(False, ASKED, f" {BAD}")],
    ),
    refused("trl prompt and completion", {"prompt": [HI], "completion": [YES]}),
    refused(
        "trl stepwise",
        {"prompt": ASKED, "completions": ["First.", "So 9."], "labels": [True, False]},
        names=["scores"],
    ),
    refused("trl language modeling", {"text": f"{ASKED} {GOOD}"}),
    refused(
        "messages alone", {"messages": [HI, YES]}, names=["messages", "label", "rejected_response"]
    ),
    # Pairs with a prompt of text beside whole conversations
    taken(
        "tulu preference mixture",
        {"id": "a", "source": "b", "prompt": PAST[0]["content"], "chosen": [*PAST, HI, YES]}
        | {"rejected": [*PAST, HI, NO]},
        wanted=[pair((*PAST, HI))],
    ),
    refused(
        "a prompt that is not that of the conversations",
        {**BINARIZED, "prompt": "Which is smaller, 7 or 9?"},
        names=["'prompt'", "'chosen'"],
    ),
    taken(
        "Snorkel",
        {**BINARIZED, "all_generated_responses": [GOOD, BAD, WHY], "all_rm_scores": [3.0, 1.0]},
    ),
    mapped(
        "a prompt of text and a message as answer",
        {"prompt": ASKED, "chosen": [YES], "rejected": [NO]},
        to={},
        names=["data.wrap"],
        wrap=Wrapping(True),
    ),
    taken(
        "text with white space around it",
        {"prompt": f"{ASKED}\n", "chosen": f"\n{GOOD}\n", "rejected": f" {BAD}"},
        wanted=[pair(chosen=(bot(f"{GOOD}\n"),))],
        wrap=Wrapping(True),
    ),
    # Transcripts
    taken(
        "Dahoas full-hh-rlhf",
        {"prompt": HUMAN, "response": f" {GOOD}", **ANSWERS},
        wanted=[pair(HUMAN, f" {GOOD}", f" {BAD}")],
    ),
    # ShareGPT and LLaMA-Factory
    taken("ShareGPT", {"prompt": gpt(HI), "chosen": gpt(YES), "rejected": gpt(NO)}),
    taken(
        "LLaMA-Factory ShareGPT",
        {"conversations": gpt(HI), "chosen": gpt(YES)[0], "rejected": gpt(NO)[0]},
    ),
    taken(
        "LLaMA-Factory ShareGPT with system",
        {"conversations": gpt(*PAST, HI), "chosen": gpt(YES)[0], "rejected": gpt(NO)[0]}
        | {"system": SYSTEM["content"]},
        wanted=[pair((SYSTEM, *PAST, HI))],
    ),
    taken(
        "LLaMA-Factory ShareGPT KTO",
        {"conversations": gpt(HI, YES), "kto_tag": True},
        {"conversations": gpt(HI, NO), "kto_tag": False},
        wanted=[label(True), label(False, answer=(NO,))],
    ),
    taken("LLaMA-Factory KTO", {"messages": [HI, YES], "kto_tag": "true"}, wanted=[label(True)]),
    taken(
        "LLaMA-Factory Alpaca",
        ALPACA,
        {**ALPACA, "input": ""},
        wanted=[pair(JOINED), pair((user("Which is larger?"),))],
    ),
    taken(
        "LLaMA-Factory Alpaca with history",
        {**ALPACA, "history": [[PAST[0]["content"], PAST[1]["content"]]]},
        wanted=[pair((*PAST, *JOINED))],
    ),
    taken(
        "LLaMA-Factory Alpaca KTO",
        {"instruction": "Which is larger?", "input": "7 or 9", "output": GOOD, "kto_tag": True},
        wanted=[label(True, JOINED)],
    ),
    taken(
        "ShareGPT with labels",
        {"conversations": gpt(HI, YES), "label": True},
        wanted=[label(True)],
    ),
    refused("ShareGPT without answers to compare", {"conversations": gpt(HI, YES)}),
    # OpenAI, axolotl, ms-swift
    taken("OpenAI", OPENAI),
    taken(
        "OpenAI as JSON text",
        {
            **OPENAI,
            "input": '{"messages": [{"role": "user", "content": "Which is larger, 7 or 9?"}]}',
        },
    ),
    taken("axolotl", {"messages": [HI], "chosen": YES, "rejected": NO}),
    taken("Intel orca_dpo_pairs", {**ORCA, "system": ""}, ORCA, wanted=[CHAT, pair((SYSTEM, HI))]),
    taken(
        "axolotl chatml.argilla",
        {"instruction": ASKED, "chosen_response": GOOD, "rejected_response": BAD},
    ),
    taken(
        "distilabel-math-preference-dpo",
        {"metadata": "x", "instruction": ASKED, "chosen_response": GOOD, "chosen_rating": 9.0}
        | {"rejected_response": BAD, "rejected_rating": 7.0},
    ),
    refused(
        "a question with a context of one word",
        {**ORCA, "context": "Numbers"},
        names=["'context'", "'question'"],
    ),
    taken(
        "distilabel-intel-orca-dpo-pairs",
        {"system": SYSTEM["content"], "input": ASKED, "chosen": GOOD, "rejected": BAD}
        | {"generations": [GOOD, BAD], "order": ["chosen", "rejected"], "rationale": WHY},
        wanted=[pair((SYSTEM, HI))],
    ),
    taken("ms-swift", {"messages": [HI, YES], "rejected_response": BAD}),
    taken("ms-swift with messages", {"messages": [HI, YES], "rejected_messages": [HI, NO]}),
    taken("messages with a label", {"messages": [HI, YES], "label": True}, wanted=[label(True)]),
    # Other trainers
    taken(
        "NeMo-RL",
        {
            **NEMO,
            "completions": [{"rank": 1, "completion": [NO]}, {"rank": 0, "completion": [YES]}],
        },
    ),
    refused(
        "NeMo-Aligner KTO",
        {"prompt": ASKED, "response": GOOD, "preference": "chosen"},
    ),
    mapped(
        "torchtune",
        {"chosen_conversations": [HI, YES], "rejected_conversations": [HI, NO]},
        to={"chosen": "chosen_conversations", "rejected": "rejected_conversations"},
    ),
    mapped(
        "truthy-dpo",
        {"system": "Be brief.", "prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        to={},
        names=["data.wrap"],
        wrap=Wrapping(True),
        wanted=[pair((SYSTEM, HI))],
    ),
    refused(
        "Vertex AI",
        {"contents": [{"role": "user", "parts": [{"text": ASKED}]}]}
        | {"completions": [{"score": 1.0, "completion": {"role": "model", "parts": []}}]},
    ),
    # Comparisons with a winner
    taken(
        "SHP", SHP, {**SHP, "human_ref_A": BAD, "human_ref_B": GOOD, "labels": 0}, wanted=[CHAT] * 2
    ),
    taken(
        "WebGPT with a tie",
        {**WEBGPT, "score_0": 1.0, "score_1": -1.0, "answer_0": GOOD, "answer_1": BAD},
        {**WEBGPT, "score_0": 0.0, "score_1": 0.0},
        wanted=[pair(scores=(1.0, -1.0))],
        ties=1,
    ),
    taken(
        "HelpSteer2 preferences",
        STEER2,
        {**STEER2, "response_1": BAD, "response_2": GOOD, "preference_strength": 1},
        {**STEER2, "preference_strength": 0},
        wanted=[pair(margin=2.0), pair(margin=1.0)],
        ties=1,
    ),
    taken(
        "HelpSteer",
        {"prompt": ASKED, "response": GOOD, "helpfulness": 4, "correctness": 4, "coherence": 4}
        | {"complexity": 1, "verbosity": 1},
        wanted=[scored((HI,), ((YES,), 4.0))],
    ),
    taken(
        "arena with ties",
        ARENA,
        *({**ARENA, "winner": one} for one in ("tie", "tie (bothbad)")),
        ties=2,
    ),
    taken(
        "arena on Kaggle, with a tie",
        KAGGLE,
        {**KAGGLE, "response_a": f'["{BAD}"]', "response_b": f'["{GOOD}"]'}
        | {"winner_model_a": 0, "winner_model_b": 1},
        {**KAGGLE, "winner_model_a": 0, "winner_tie": 1},
        wanted=[CHAT] * 2,
        ties=1,
    ),
    taken("PKU-SafeRLHF safer", {**SAFE, "safer_response_id": 1}),
    taken(
        "PKU-SafeRLHF both, and the safer one is asked for",
        {**SAFE, "better_response_id": 0, "safer_response_id": 1},
        mapped={"better_response_id": ""},
    ),
    taken("AlpacaFarm", {**FARM, "preference": 2, "raw_preference": 2}, wanted=[pair(JOINED)]),
    taken(
        "stack-exchange-paired",
        {"qid": 1, "question": ASKED, "response_j": GOOD, "response_k": BAD, "date": "2012/01/02"},
    ),
    refused(
        "two answers and no winner",
        {"prompt": ASKED, "response_a": GOOD, "response_b": BAD},
    ),
    refused(
        "two answers and a preference",
        {"prompt": ASKED, "completion_a": GOOD, "completion_b": BAD, "preference": 1},
    ),
    # Many answers with scores
    taken(
        "scored",
        {"prompt": ASKED, "completions": [GOOD, BAD], "scores": [0.9, 0.0]},
        wanted=[scored(ASKED, (GOOD, 0.9), (BAD, 0.0))],
    ),
    taken(
        "scored, a row for each",
        {"prompt": ASKED, "completion": GOOD, "score": 0.9},
        wanted=[scored(ASKED, (GOOD, 0.9))],
    ),
    taken(
        "Nectar",
        {"prompt": HUMAN, "answers": RANKED, "turns": 1},
        wanted=[scored(HUMAN, (GOOD, -1.0), (BAD, -2.0))],
    ),
    taken(
        "UltraFeedback",
        {"source": "x", "instruction": ASKED, "completions": [RATED, OVERALL]},
        wanted=[scored((HI,), ((YES,), 4.75), ((NO,), 2.0))],
    ),
    refused(
        "AlpacaEval", {"instruction": ASKED, "output": GOOD, "generator": "m"}, names=["score"]
    ),
    refused(
        "completions without scores",
        {"prompt": ASKED, "completions": [GOOD, BAD]},
        names=["scores"],
    ),
    # Names that have to be told
    mapped(
        "a question",
        {"question": ASKED, **ANSWERS},
        to={"prompt": "question"},
        names=["'question'"],
        wanted=[TEXT],
    ),
    mapped(
        "responses that are numbered",
        {"prompt": ASKED, "response_1": GOOD, "response_2": BAD, "complexity": 1},
        to={"chosen": "response_1", "rejected": "response_2"},
        wanted=[BARE],
    ),
    mapped(
        "an instruction whose input is empty",
        {"instruction": ASKED, "input": "", "completion": GOOD, "label": True},
        {"instruction": ASKED, "input": "", "completion": BAD, "label": False},
        to={"prompt": "instruction"},
        wanted=[label(True, ASKED, GOOD), label(False, ASKED, BAD)],
    ),
    mapped(
        "responses with ratings",
        {"question": ASKED, "responses": [GOOD, BAD], "ratings": [5, 2]},
        to={"prompt": "question", "completions": "responses", "scores": "ratings"},
        wanted=[scored(ASKED, (GOOD, 5.0), (BAD, 2.0))],
    ),
    refused(
        "a typo",
        {"prompt": ASKED, "chosn": GOOD, "reject": BAD},
        names=["--map chosen=chosn --map rejected=reject"],
    ),
    refused(
        "other names of a pair",
        {"question": ASKED, "good": GOOD, "bad": BAD},
        names=["--map prompt=question --map chosen=YOURS --map rejected=YOURS"],
    ),
    refused(
        "other names of a completion and its label",
        {"prompt": ASKED, "response": GOOD, "thumbs": "up"},
        names=["--map completion=response --map label=YOURS"],
    ),
    refused(
        "other names of a scored completion",
        {"question": ASKED, "response": GOOD, "rating": 4},
        names=["--map prompt=question --map completion=response --map score=rating"],
    ),
    refused(
        "columns that say something about others",
        {"prompt": ASKED, "response": GOOD, "label_type": 1, "chosen_index": 0, "is_train": True}
        | {"completion_tokens": 5},
    ),
    # Blocks, JSON text, one message
    taken(
        "blocks of text",
        {"prompt": [blocks(HI)], "chosen": [blocks(YES)], "rejected": [blocks(NO)]},
    ),
    taken("one message", {"prompt": [HI], "chosen": YES, "rejected": NO}),
    taken("one message as prompt", {"prompt": HI, "chosen": YES, "rejected": BAD}, wanted=[pair()]),
    refused(
        "a block with an image",
        {"prompt": [blocks(HI, IMAGE)], "chosen": [YES], "rejected": [NO]},
        names=["'prompt[0]'", "'image'"],
    ),
    refused(
        "a column of images",
        {"prompt": [HI], "chosen": [YES], "rejected": [NO], "images": ["a.png"]},
        names=["'images'"],
    ),
    # What could mean two things
    mapped(
        "a label and a score",
        {"prompt": ASKED, "completion": GOOD, "label": True, "score": 0.5},
        to={"score": ""},
        names=["unpaired", "scored_long"],
        wanted=[label(True, ASKED, GOOD)],
    ),
    mapped(
        "pairs and scored answers",
        {"prompt": ASKED, **ANSWERS, "completions": [GOOD, BAD], "scores": [1.0, 0.0]},
        to={"completions": "", "scores": ""},
        names=["paired", "scored"],
        wanted=[TEXT],
    ),
    refused(
        "a rejected response and a label",
        {"messages": [HI, YES], "rejected_response": BAD, "label": True},
        names=["label", "rejected_response"],
    ),
    refused(
        "a pair and a label of one conversation",
        {"conversations": gpt(HI, YES), "chosen": GOOD, "rejected": BAD, "kto_tag": True},
        names=["kto_tag", "chosen"],
    ),
]


def read(path, case, columns):
    """The rows of a file as stage 1 reads them, its ties and its shape; one error ends it."""
    inputs = open_inputs([path])
    shape = common_shape(inputs, columns)
    require_scores(inputs, shape)
    wrap = case.wrap if columns is case.mapped else UNWRAPPED
    records, rejected = parted(read_text_rows(inputs, replace(shape, wrap=wrap)))
    for bad in rejected:
        if bad.reason != "tie":
            raise UsageError(bad.detail)
    found = [
        (one.prompt, one.completions, one.roles, one.scores, dict(one.carried)) for one in records
    ]
    return found, len(rejected), shape


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_a_file_is_read_as_its_format_means_it_or_refused_by_its_columns(tmp_path, case):
    path = write_rows(tmp_path / f"a.{case.ending}", case.rows)
    if case.names:
        with pytest.raises(UsageError) as caught:
            read(path, case, {})
        assert [name for name in case.names if name not in str(caught.value)] == []
    if case.wanted:
        found, ties, shape = read(path, case, case.mapped)
        assert (found, ties) == (case.wanted, case.ties)
        # Prompts to sample from are read in the same way, those of ties too.
        prompts = read_prompts(open_inputs([path]), case.mapped, case.wrap).prompts
        assert {repr(one.text) for one in prompts} == {repr(one[0]) for one in case.wanted}
        assert all(
            column in shape.read_as for column in shape.source.values() if column in case.rows[0]
        )
