"""Every shape of rows that is known, a line each: its prompt, its answers, and which is good."""

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

# A pair of answers; one answer with a label; all answers of a prompt with scores; one of them.
Kind: TypeAlias = Literal["pair", "label", "scores", "score"]
OPTIONAL = ("system", "tools", "chat_template_kwargs")  # of conversations, in rows of any shape
PAIR = (Role.CHOSEN, Role.REJECTED)


@dataclass(frozen=True)
class DataShape:
    """A shape of rows, all of whose columns a file of it has."""

    kind: Kind
    name: str
    prompt: Read | None  # None: what both answers begin with
    answers: Read
    good: Read | None = None  # or how good; None: the first of a pair, of others nothing says so
    having: tuple[str, ...] = ()  # columns that it has as well
    scores: tuple[str, ...] = ()  # columns of scores that it may have
    tools: str = "tools"  # where they stand
    margin: str = ""  # the name of how far the better answer is ahead, if that is kept

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a file of it has."""
        parts = [one.columns for one in (self.prompt, self.answers, self.good) if one]
        named = (name.partition(".")[0] for part in parts for name in part)
        return tuple(dict.fromkeys((*named, *self.having)))

    @property
    def optional(self) -> tuple[str, ...]:
        """Further columns that it reads where a file has them."""
        return tuple(name for one in (self.prompt, self.answers) if one for name in one.optional)

    @property
    def is_long(self) -> bool:
        """Whether scored completions of one prompt stand in rows that are to be joined."""
        return self.kind == "score"

    def __reduce__(self) -> tuple[object, ...]:
        """Another process finds it in its own table: the ways to read it cannot be sent."""
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
    source: Mapping[str, str]  # our column: the user's column
    optional: tuple[str, ...] = ()  # optional columns that a file has, by our names
    carried: tuple[str, ...] = ()  # numeric columns kept with each row, by our names
    unread: tuple[str, ...] = ()  # the user's columns that nothing reads
    wrap: Wrapping = UNWRAPPED  # what becomes of plain text

    @property
    def name(self) -> str:
        """The name of its line in the table."""
        return self.declared.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The user's columns to read, where a file has them."""
        return tuple(self.source.values())

    @property
    def read_as(self) -> str:
        """Which of the user's columns are read as what, in one line."""
        one = self.declared
        beside = [name for name in one.optional if name in self.optional]
        asked = (*one.prompt.columns, *beside) if one.prompt else ("what both begin with",)
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
        """The user's name of a column, which may have a dot."""
        head, dot, key = column.partition(".")
        return self.source.get(head, head) + dot + key

    def _other_winner(self) -> str:
        """Names a second column that says which answer is good, where a file has two."""
        one = self.declared
        for other in SHAPES:
            if one.good and other.good and other != one and replace(other, good=one.good) == one:
                for column in {*other.good.columns} & {*self.unread}:
                    return f" (and not {column}, which --map {one.good.columns[0]}= takes)"
        return ""

    @property
    def lacks_scores(self) -> bool:
        """Whether nothing says which completions are good."""
        is_missing = any(name not in self.source for name in self.declared.scores)
        is_scored = self.declared.kind in ("scores", "score")
        return is_scored and (is_missing or self.declared.good is None)


# A prompt and its completions, their roles, their scores, and how far the chosen one is ahead.
Found: TypeAlias = (
    "tuple[Text, tuple[Text, ...], tuple[Role, ...], tuple[float | None, ...], float]"
)


def read_row(cells: Cells, one: DataShape) -> Found:
    """What a row says in this shape; raises BadRow."""
    if one.kind == "pair":
        ahead = one.good(cells) if one.good else 1.0
        if ahead == 0:
            raise BadRow("tie", f"{' and '.join(one.answers.columns)}: a tie has no chosen answer")
        prompt, answers = _read_pair(cells, one)
        scores = tuple(map(cells.number, one.scores)) or (None, None)
        if ahead < 0:
            answers, scores = answers[::-1], scores[::-1]
        return prompt, answers, PAIR, scores, abs(ahead)
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
    """The prompt of a row as `read_row` reads it, whichever of its answers is good."""
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
    """The beginning and the ends of two whole conversations in which a prompt of text is said."""
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
            f"{cells('prompt')[1]!r} is text, which no user says in what {found[0][1]!r} and "
            f"{found[1][1]!r} begin with: --map prompt= leaves it out and takes that beginning",
        )
    return begun, ends
