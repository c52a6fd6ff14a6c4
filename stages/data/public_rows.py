"""Reads rows as public data sets and other trainers have them, a function for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...schemas.rows import BadRow, Message, Role, Text
from .data_shape import Cells, ReadRow, Shape
from .preference_rows import PAIR, forked, read_prompted_pair
from .validate import (
    ASSISTANT,
    is_blank,
    parse_json,
    read_completion,
    read_label,
    read_list,
    read_number,
    read_prompt,
    read_text,
    shown,
)


def read_openai(cells: Cells, _: Shape) -> ReadRow:
    """OpenAI, Together, Fireworks: the prompt's messages and tools are in one object."""
    given = cells.get("input")
    given = parse_json(given, "input") if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise BadRow("schema", f"'input' is not an object with 'messages': {shown(given)}")
    prompt = _asked(given.get("messages"), "input.messages")
    found = _pair(prompt, cells, ("preferred_output", "non_preferred_output"))
    return ReadRow(prompt, found, PAIR, (None, None), {"tools": given.get("tools")})


def read_messages_pair(cells: Cells, shape: Shape) -> ReadRow:
    """LLaMA-Factory and axolotl: a conversation, and the two messages that may follow it."""
    column = shape.declared.columns[0]
    prompt = _asked(cells.get(column), column)
    return ReadRow(prompt, _pair(prompt, cells, ("chosen", "rejected")), PAIR, (None, None))


def read_binarized(cells: Cells, shape: Shape) -> ReadRow:
    """UltraFeedback binarized: `messages` are the chosen conversation once more."""
    again = cells.get("messages")
    if again and read_text(again, "messages") != read_text(cells.get("chosen"), "chosen"):
        raise BadRow("schema", "'messages' are not 'chosen': leave them out with --map messages=")
    return read_prompted_pair(cells, shape)


def read_answered(cells: Cells, shape: Shape) -> ReadRow:
    """A question of the user, and two answers in columns of their own, the better one first."""
    asked, better, worse, *_ = shape.declared.columns
    is_instruction = asked == "instruction"
    prompt = _instructed(cells, shape) if is_instruction else _user(cells.get(asked), asked)
    return ReadRow(prompt, _pair(prompt, cells, (better, worse)), PAIR, (None, None))


def read_rejected_response(cells: Cells, _: Shape) -> ReadRow:
    """ms-swift: a conversation that ends with the chosen answer, and the other answer."""
    prompt, chosen = _ended(cells.get("messages"), "messages")
    rejected = read_completion(cells.get("rejected_response"), "rejected_response", prompt)
    return ReadRow(prompt, (chosen, rejected), PAIR, (None, None))


def read_rejected_messages(cells: Cells, _: Shape) -> ReadRow:
    """ms-swift: two conversations with one beginning, the first of them chosen."""
    columns = ("messages", "rejected_messages")
    for column in columns:
        _ended(cells.get(column), column)
    chosen, rejected = (_messages(cells.get(column), column) for column in columns)
    return forked(chosen, rejected, columns)


def read_messages_label(cells: Cells, shape: Shape) -> ReadRow:
    """ms-swift and LLaMA-Factory: a conversation whose last answer is good or bad."""
    column, label = shape.declared.columns
    prompt, answer = _ended(cells.get(column), column)
    return _labelled(prompt, answer, cells, label)


def read_alpaca_pair(cells: Cells, shape: Shape) -> ReadRow:
    """LLaMA-Factory's ranking: an instruction with its input, and two answers."""
    prompt = _instructed(cells, shape)
    return ReadRow(prompt, _pair(prompt, cells, ("chosen", "rejected")), PAIR, (None, None))


def read_alpaca_label(cells: Cells, shape: Shape) -> ReadRow:
    """LLaMA-Factory's KTO: an instruction with its input, an answer and its label."""
    prompt = _instructed(cells, shape)
    answer = read_completion(cells.get("output"), "output", prompt)
    return _labelled(prompt, answer, cells, "kto_tag")


def read_alpaca_farm(cells: Cells, shape: Shape) -> ReadRow:
    """AlpacaFarm: an instruction with its input, and the number of the output that won."""
    won = read_number(cells.get("preference"), "preference")
    if not 1 <= won <= 2:
        raise BadRow("bad_label", f"'preference' is not between 1 and 2: {shown(won)}")
    return _won(_instructed(cells, shape), cells, ("output_1", "output_2"), 1.5 - won)


def read_nemo(cells: Cells, _: Shape) -> ReadRow:
    """NeMo RL: a conversation and two completions with ranks, of which the lower is the better."""
    prompt = _asked(cells.get("context"), "context")
    ranked = read_list(cells.get("completions"), "completions")
    if len(ranked) != 2 or not all(isinstance(one, dict) for one in ranked):
        raise BadRow("schema", f"'completions' are not two objects with ranks: {shown(ranked)}")
    first, second = (read_number(one.get("rank"), "rank") for one in ranked)
    answers = {f"completion of rank {one['rank']}": one.get("completion") for one in ranked}
    if first == second:
        raise _tie("rank", first)
    names = [*answers]
    return _won(prompt, answers, (names[0], names[1]), second - first)


def read_shp(cells: Cells, _: Shape) -> ReadRow:
    """SHP: two comments on a post; the label is 1 where the first is the better one."""
    prompt = _user(cells.get("history"), "history")
    is_first = read_label(cells.get("labels"), "labels")
    return _won(prompt, cells, ("human_ref_A", "human_ref_B"), 1.0 if is_first else -1.0)


def read_webgpt(cells: Cells, _: Shape) -> ReadRow:
    """WebGPT's comparisons: a question and two answers, each with a score."""
    asked = cells.get("question")
    asked = asked.get("full_text") if isinstance(asked, dict) else asked
    first, second = (read_number(cells.get(name), name) for name in ("score_0", "score_1"))
    found = _won(_user(asked, "question"), cells, ("answer_0", "answer_1"), first - second)
    scores = (max(first, second), min(first, second))
    return ReadRow(found.prompt, found.completions, PAIR, scores)


def read_helpsteer(cells: Cells, shape: Shape) -> ReadRow:
    """HelpSteer 2 and 3: two responses; a strength below 0 is for the first of them."""
    asked, first, second, strength = shape.declared.columns
    given = cells.get(asked)
    if isinstance(given, str) and "<extra_id_1>" in given:
        raise BadRow("already_rendered", f"{asked!r} has turns marked by <extra_id_1>: write them")
    prompt = _user(given, asked)
    ahead = -read_number(cells.get(strength), strength)
    found = _won(prompt, cells, (first, second), ahead)
    more = {"margin": abs(ahead)}
    return ReadRow(found.prompt, found.completions, PAIR, found.scores, more)


def read_saferlhf(cells: Cells, shape: Shape) -> ReadRow:
    """PKU-SafeRLHF: two responses, and the number of the one that won."""
    *_, winner = shape.declared.columns
    is_second = read_label(cells.get(winner), winner)
    prompt = _user(cells.get("prompt"), "prompt")
    return _won(prompt, cells, ("response_0", "response_1"), -1.0 if is_second else 1.0)


def read_arena(cells: Cells, _: Shape) -> ReadRow:
    """Chatbot arena: two conversations, and which of their models won."""
    columns = ("conversation_a", "conversation_b")
    first, second = (_messages(cells.get(column), column) for column in columns)
    winner = cells.get("winner")
    if winner in ("tie", "tie (bothbad)", "both_bad"):
        raise _tie("winner", winner)
    if winner not in ("model_a", "model_b"):
        raise BadRow("bad_label", f"'winner' is neither model_a nor model_b: {shown(winner)}")
    pair = (first, second) if winner == "model_a" else (second, first)
    return forked(*pair, columns if winner == "model_a" else columns[::-1])


def read_arena_turns(cells: Cells, _: Shape) -> ReadRow:
    """Chatbot arena as on Kaggle: lists of the turns of each side, and three flags."""
    sides = ("response_a", "response_b")
    asked, *said = ([*_turns(cells.get(name), name)] for name in ("prompt", *sides))
    if len({len(asked), *map(len, said)}) > 1:
        raise BadRow("schema", "'prompt', 'response_a' and 'response_b' differ in their turns")
    first, second = (
        tuple(one for turn in zip(asked, turns, strict=True) for one in _exchange(*turn))
        for turns in said
    )
    if read_label(cells.get("winner_tie"), "winner_tie"):
        raise _tie("winner_tie", cells.get("winner_tie"))
    flags = [read_label(cells.get(f"winner_model_{one}"), f"winner_model_{one}") for one in "ab"]
    if sum(flags) != 1:
        raise BadRow("bad_label", "'winner_model_a' and 'winner_model_b' name no winner, or two")
    pair = (first, second) if flags[0] else (second, first)
    return forked(*pair, sides if flags[0] else sides[::-1])


def read_nectar(cells: Cells, _: Shape) -> ReadRow:
    """Nectar: answers with ranks, of which 1 is the best; a score is the rank below zero."""
    prompt = read_prompt(cells.get("prompt"), "prompt")
    answers = read_list(cells.get("answers"), "answers")
    if not answers or not all(isinstance(answer, dict) for answer in answers):
        raise BadRow("schema", f"'answers' is not a list of objects: {shown(answers)}")
    said = tuple(read_completion(one.get("answer"), "answer", prompt) for one in answers)
    scores = tuple(-read_number(one.get("rank"), "rank") for one in answers)
    return ReadRow(prompt, said, (Role.CANDIDATE,) * len(said), scores)


def joined_input(instruction: str, given: Any) -> str:
    """An instruction and its input, as LLaMA-Factory joins them."""
    if given is None or given == "":
        return instruction
    if not isinstance(given, str):
        raise BadRow("schema", f"'input' is not text: {shown(given)}")
    return f"{instruction}\n{given}"


def _asked(value: Any, column: str) -> tuple[Message, ...]:
    """The messages of a prompt, behind which an answer may stand."""
    messages = _messages(value, column)
    if messages[-1]["role"] == ASSISTANT:
        raise BadRow("schema", f"{column!r} ends with the assistant: where is the prompt's end?")
    return messages


def _ended(value: Any, column: str) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages before the last, and the last, which is the assistant's."""
    messages = _messages(value, column)
    if messages[-1]["role"] != ASSISTANT:
        raise BadRow("schema", f"{column!r} does not end with a message of the assistant")
    prompt, answer = messages[:-1], messages[-1:]
    if is_blank(prompt):
        raise BadRow("empty_prompt", f"{column!r} has nothing before its answer")
    if prompt[-1]["role"] == ASSISTANT:
        raise BadRow("schema", f"{column!r} ends with two messages of the assistant")
    if is_blank(answer):
        raise BadRow("empty_completion", f"the last message of {column!r} is empty")
    return prompt, answer


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    messages = read_prompt(value, column)
    if isinstance(messages, str):
        raise BadRow("schema", f"{column!r} is not a list of messages: {shown(messages)}")
    return messages


def _user(value: Any, column: str) -> Text:
    """A prompt that is a user's message where it is text."""
    prompt = read_prompt(value, column)
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def _instructed(cells: Cells, shape: Shape) -> tuple[Message, ...]:
    """The turns before an instruction, and the instruction with its input.

    A JSON row has the cells of columns too that the user left out.
    """
    asked = read_prompt(cells.get("instruction"), "instruction")
    if not isinstance(asked, str):
        raise BadRow("schema", f"'instruction' is not text: {shown(asked)}")
    before: list[Message] = []
    history = cells.get("history") if "history" in shape.source else None
    for turn in read_list(history, "history") if history else ():
        if not (isinstance(turn, list) and len(turn) == 2 and all(map(_is_text, turn))):
            raise BadRow("schema", f"'history' is not a list of pairs of texts: {shown(turn)}")
        before += _exchange(*turn)
    content = joined_input(asked, cells.get("input") if "input" in shape.source else None)
    return (*before, {"role": "user", "content": content})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _exchange(asked: str, said: str) -> tuple[Message, Message]:
    return {"role": "user", "content": asked}, {"role": ASSISTANT, "content": said}


def _turns(value: Any, column: str) -> list[str]:
    """A list of texts, which may be given as JSON text; a text is a list of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, column)
    turns = [value] if isinstance(value, str) else read_list(value, column)
    if not turns or not all(map(_is_text, turns)) or not all(one.strip() for one in turns):
        raise BadRow("schema", f"{column!r} has turns that are not text: {shown(value)}")
    return turns


def _pair(prompt: Text, cells: Cells, columns: Sequence[str]) -> tuple[Text, ...]:
    return tuple(read_completion(cells.get(column), column, prompt) for column in columns)


def _labelled(prompt: Text, answer: Text, cells: Cells, column: str) -> ReadRow:
    role = Role.DESIRABLE if read_label(cells.get(column), column) else Role.UNDESIRABLE
    return ReadRow(prompt, (answer,), (role,), (None,))


def _won(prompt: Text, cells: Cells, columns: tuple[str, str], ahead: float) -> ReadRow:
    """A pair of two answers; `ahead` is above 0 where the first one won, and 0 for a tie."""
    if ahead == 0:
        raise _tie(" and ".join(columns), "no winner")
    pair = _pair(prompt, cells, columns if ahead > 0 else columns[::-1])
    return ReadRow(prompt, pair, PAIR, (None, None))


def _tie(column: str, value: Any) -> BadRow:
    return BadRow("tie", f"{column}: a tie has no chosen answer ({shown(value)})")
