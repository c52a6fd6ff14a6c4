"""The table of known row shapes: prompt, answers, and which answer is good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from ...schemas.rows import BadRow, Role, Text
from . import row_parts as parts
from .cells import UNWRAPPED, Wrapping, read_text
from .row_parts import (
    Cells,
    Read,
    all_but_last,
    answers,
    chat,
    conversations,
    each,
    given,
    instruction,
    label,
    last,
    score,
    second_above,
    user,
)

# A pair of answers; one labelled answer; all answers of a prompt with scores; one scored answer.
Kind: TypeAlias = Literal["pair", "label", "scores", "score"]
OPTIONAL = ("system", "tools", "chat_template_kwargs")  # of conversations, in rows of any shape
PAIR = (Role.CHOSEN, Role.REJECTED)


@dataclass(frozen=True)
class DataShape:
    """A shape of rows; a file of this shape has all of its columns."""

    kind: Kind
    name: str
    prompt: Read | None  # None: the common beginning of both answers
    answers: Read
    good: Read | None = None  # which or how good; None: the first of a pair, else unknown
    having: tuple[str, ...] = ()  # more columns that the shape must have
    scores: tuple[str, ...] = ()  # columns of scores that it may have
    tools: str = "tools"  # the column of tools
    margin: str = ""  # the column for the better answer's margin, if it is kept

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a file of this shape has."""
        parts = [one.columns for one in (self.prompt, self.answers, self.good) if one]
        named = (name.partition(".")[0] for part in parts for name in part)
        return tuple(dict.fromkeys((*named, *self.having)))

    @property
    def optional(self) -> tuple[str, ...]:
        """More columns that are read if a file has them."""
        return tuple(name for one in (self.prompt, self.answers) if one for name in one.optional)

    @property
    def is_long(self) -> bool:
        """Whether a prompt's scored completions are in rows of their own, to be joined."""
        return self.kind == "score"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles its place in the table, because its readers cannot be pickled."""
        return _of_table, (SHAPES.index(self),)


def _of_table(number: int) -> DataShape:
    return SHAPES[number]


pair, labelled = partial(DataShape, "pair"), partial(DataShape, "label")
scored, single = partial(DataShape, "scores"), partial(DataShape, "score")
CHOSEN, SCORES = answers("chosen", "rejected"), ("chosen_score", "rejected_score")
MESSAGES = all_but_last("messages"), last("messages")
CONVERSATIONS = all_but_last("conversations"), last("conversations")
INSTRUCTION = instruction("instruction", optional=("input", "history"))
WITH_INPUT = instruction("instruction", optional=("input",))
RATED = parts.first_field("completions.fine-grained_score", "completions.overall_score")
PREFERRED = answers("preferred_output", "non_preferred_output")
WEBGPT, RATINGS = answers("answer_0", "answer_1"), ("score_0", "score_1")
LOWER = parts.lower_rank("completions.rank")
WINNER = parts.flags("winner_model_a", "winner_model_b", "winner_tie")
STEER2, STEER3 = answers("response_1", "response_2"), answers("response1", "response2")
SAFE = answers("response_0", "response_1")
of_0_and_1, of_1_and_2 = second_above(0.5, 0.5), second_above(1.5, 0.5)
strength = second_above(0)

SHAPES = (
    pair("paired", given("prompt"), CHOSEN, scores=SCORES),
    pair("paired", None, parts.wholes("chosen", "rejected", optional=("prompt",)), scores=SCORES),
    labelled("unpaired", given("prompt"), answers("completion"), label("label")),
    scored("scored", given("prompt"), each("completions"), parts.of_each(), scores=("scores",)),
    single("scored_long", given("prompt"), answers("completion"), score("score")),
    scored("UltraFeedback", user("instruction"), each("completions.response"), RATED),
    scored("Nectar", given("prompt"), each("answers.answer"), parts.minus_ranks("answers.rank")),
    single("HelpSteer", user("prompt"), answers("response"), score("helpfulness")),
    single("AlpacaEval", WITH_INPUT, answers("output")),
    pair("Orca", user("question"), CHOSEN, having=("system",)),
    pair("Orca", user("input"), CHOSEN, having=("system",)),
    pair("Argilla", INSTRUCTION, answers("chosen_response", "rejected_response")),
    pair("StackExchange", user("question"), answers("response_j", "response_k")),
    pair("UltraInteract", chat("trajectory"), CHOSEN),
    pair("axolotl", chat("messages"), CHOSEN),
    pair("LLaMA-Factory", chat("conversations"), CHOSEN),
    pair("LLaMA-Factory", instruction("instruction", "input", optional=("history",)), CHOSEN),
    labelled("LLaMA-Factory", INSTRUCTION, answers("output"), label("kto_tag")),
    labelled("LLaMA-Factory", *MESSAGES, label("kto_tag")),
    labelled("LLaMA-Factory", *CONVERSATIONS, label("kto_tag")),
    labelled("ShareGPT", *CONVERSATIONS, label("label")),
    labelled("ms-swift", *MESSAGES, label("label")),
    pair("ms-swift", all_but_last("messages"), last("messages", "rejected_response")),
    pair("ms-swift", None, conversations("messages", "rejected_messages")),
    pair("OpenAI", chat("input.messages"), PREFERRED, tools="input.tools"),
    pair("NeMo RL", chat("context"), each("completions.completion"), LOWER),
    pair("AlpacaFarm", WITH_INPUT, answers("output_1", "output_2"), of_1_and_2("preference")),
    pair("SHP", user("history"), answers("human_ref_A", "human_ref_B"), parts.first_if("labels")),
    pair("WebGPT", user("question.full_text"), WEBGPT, parts.higher(*RATINGS), scores=RATINGS),
    pair("HelpSteer2", user("prompt"), STEER2, strength("preference_strength"), margin="margin"),
    pair("HelpSteer3", user("context"), STEER3, strength("overall_preference"), margin="margin"),
    pair("arena", None, conversations("conversation_a", "conversation_b"), parts.winner("winner")),
    pair("arena", None, parts.exchanges("response_a", "response_b"), WINNER, having=("prompt",)),
    pair("PKU-SafeRLHF", user("prompt"), SAFE, of_0_and_1("better_response_id")),
    pair("PKU-SafeRLHF", user("prompt"), SAFE, of_0_and_1("safer_response_id")),
)
# A file of prompts alone, as `align sample` reads it.
PROMPTS = single("prompts", given("prompt"), answers())


@dataclass(frozen=True)
class Shape:
    """The shape of a run's rows, and the columns they are read from."""

    declared: DataShape
    source: Mapping[str, str]  # align's column: the user's column
    optional: tuple[str, ...] = ()  # optional columns that a file has, by align's names
    carried: tuple[str, ...] = ()  # numeric columns kept with each row, by align's names
    unread: tuple[str, ...] = ()  # the user's columns that are not read
    wrap: Wrapping = UNWRAPPED  # the handling of plain text

    @property
    def name(self) -> str:
        """The name of the shape in the table."""
        return self.declared.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The user's columns to read, if a file has them."""
        return tuple(self.source.values())

    @property
    def read_as(self) -> str:
        """One line with the use of each of the user's columns."""
        one = self.declared
        beside = [name for name in one.optional if name in self.optional]
        asked = (*one.prompt.columns, *beside) if one.prompt else ("their common beginning",)
        read: dict[str, tuple[str, ...]] = {"prompt": asked}
        if one.kind == "pair" and not one.good:
            read["chosen"], read["rejected"] = ((column,) for column in one.answers.columns)
        else:
            names = {"pair": "chosen or rejected", "scores": "completions"}
            read[names.get(one.kind, "completion")] = one.answers.columns
        if one.good:
            good = "the winner" if one.kind == "pair" else one.kind
            read[f"{good} and margin" if one.margin else good] = one.good.columns
        if one.tools != "tools":
            read["tools"] = (one.tools,)
        done = {one.margin, *(column for columns in read.values() for column in columns)}
        more = [name for name in (*one.scores, *self.optional, *self.carried) if name not in done]
        read |= {name: (name,) for name in more if name in self.source}
        lines = []
        for what, columns in read.items():
            theirs = " and ".join(map(self._called, columns))
            lines += [what if theirs == what else f"{theirs} -> {what}"] if theirs else []
        return f"{one.name} rows: {', '.join(lines)}{self._other_winner()}"

    def _called(self, column: str) -> str:
        """The user's name of a column; the name may have a dot."""
        head, dot, key = column.partition(".")
        return self.source.get(head, head) + dot + key

    def _other_winner(self) -> str:
        """Names the unused column, if a file has two that tell the good answer."""
        one = self.declared
        for other in SHAPES:
            if one.good and other.good and other != one and replace(other, good=one.good) == one:
                for column in {*other.good.columns} & {*self.unread}:
                    return f" (not {column}: --map {one.good.columns[0]}= would use it instead)"
        return ""

    @property
    def lacks_scores(self) -> bool:
        """Whether no column tells which completions are good."""
        is_missing = any(name not in self.source for name in self.declared.scores)
        is_scored = self.declared.kind in ("scores", "score")
        return is_scored and (is_missing or self.declared.good is None)


# A prompt and its completions, their roles, their scores, and the chosen one's margin.
Found: TypeAlias = (
    "tuple[Text, tuple[Text, ...], tuple[Role, ...], tuple[float | None, ...], float]"
)


def read_row(cells: Cells, one: DataShape) -> Found:
    """The values of a row in this shape; raises BadRow."""
    if one.kind == "pair":
        margin = one.good(cells) if one.good else 1.0
        if margin == 0:
            raise BadRow("tie", f"{' and '.join(one.answers.columns)}: a tie has no chosen answer")
        prompt, answers = _read_pair(cells, one)
        scores = tuple(map(cells.number, one.scores)) or (None, None)
        if margin < 0:
            answers, scores = answers[::-1], scores[::-1]
        return prompt, answers, PAIR, scores, abs(margin)
    assert one.prompt
    prompt = one.prompt(cells)
    answers = one.answers(cells, prompt)
    if one.kind == "label":
        assert one.good
        role = Role.DESIRABLE if one.good(cells) else Role.UNDESIRABLE
        return prompt, answers, (role,), (None,), 0.0
    scores = one.good(cells, len(answers)) if one.good else (None,) * len(answers)
    return prompt, answers, (Role.CANDIDATE,) * len(answers), scores, 0.0


def read_prompt_alone(cells: Cells, one: DataShape) -> Text:
    """The prompt of a row as `read_row` reads it, without reading which answer is good."""
    if one.prompt is None:
        return _read_pair(cells, one)[0]
    prompt: Text = one.prompt(cells)
    again = _said_again(cells, one, prompt) if one.kind == "pair" else None
    return again[0] if again else prompt


def _read_pair(cells: Cells, one: DataShape) -> tuple[Text, tuple[Text, ...]]:
    """The prompt and both answers, in the order of their columns."""
    if one.prompt is None:
        first, second = one.answers(cells, None)
        return parts.forked(first, second, [cells(name)[1] for name in one.answers.columns])
    prompt: Text = one.prompt(cells)
    return _said_again(cells, one, prompt) or (prompt, one.answers(cells, prompt))


def _said_again(
    cells: Cells, shape: DataShape, prompt: Text
) -> tuple[Text, tuple[Text, ...]] | None:
    """The common start and the ends of two whole conversations that contain a prompt of text."""
    if not isinstance(prompt, str):
        return None
    found = [cells(name) for name in shape.answers.columns]
    for value, _ in found:
        is_text = isinstance(value, str) and value.lstrip().startswith("[")
        if not (is_text or isinstance(value, list)):
            return None
    first, second = (read_text(*each) for each in found)
    if isinstance(first, str) or isinstance(second, str) or min(len(first), len(second)) < 2:
        return None
    begun, ends = parts.forked(first, second, [name for _, name in found])
    said = [one["content"].strip() for one in begun if one["role"] == "user"]  # type: ignore[index]
    if prompt.strip() not in said:
        raise BadRow(
            "schema",
            f"{cells('prompt')[1]!r} is text that no user's message at the start of "
            f"{found[0][1]!r} and {found[1][1]!r} holds: --map prompt= uses that start instead",
        )
    return begun, ends
