"""Every shape of rows that is known, a line each: its prompt, its answers, and which is good."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

from ...schemas.rows import BadRow, Role, Text
from . import row_parts as parts
from .cells import UNWRAPPED, Wrapping, read_text
from .row_parts import Cells

# A pair of answers; one answer with a label; all answers of a prompt with scores; one of them.
Kind: TypeAlias = Literal["pair", "label", "scores", "score"]
OPTIONAL = ("system", "tools", "chat_template_kwargs")  # of conversations, in rows of any shape
PAIR = (Role.CHOSEN, Role.REJECTED)


class Read(NamedTuple):
    """How a part of a row is read, and of which columns; a name with a dot goes into an object."""

    how: Callable[..., Any]
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()  # further columns that are read where there are some

    def __call__(self, cells: Cells, *more: Any) -> Any:
        """What is read of the cells; raises BadRow."""
        return self.how(cells, *more, *self.columns)


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
    tools: str = ""  # where they stand, if not in the column of that name
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
    def has_labels(self) -> bool:
        """Whether it says which completions are good."""
        return self.kind in ("pair", "label")

    @property
    def is_single(self) -> bool:
        """Whether a row has one completion."""
        return self.kind in ("label", "score")

    @property
    def is_long(self) -> bool:
        """Whether scored completions of one prompt stand in rows that are to be joined."""
        return self.kind == "score"

    @property
    def meanings(self) -> list[tuple[str, str]]:
        """Its columns and what each of them is read as."""
        found = [(name, "prompt") for name in (self.prompt.columns if self.prompt else ())]
        sides: tuple[str, ...]
        if self.kind == "pair":
            sides = ("chosen or rejected",) * 2 if self.good else ("chosen", "rejected")
            good = "the winner and margin" if self.margin else "the winner"
        else:
            sides = ("completions" if self.kind == "scores" else "completion",)
            good = {"label": "label", "scores": "scores", "score": "score"}[self.kind]
        found += zip(self.answers.columns, sides, strict=False)
        found += [(name, good) for name in (self.good.columns if self.good else ())]
        if self.tools:
            found.append((self.tools, "tools"))
        joined: dict[str, dict[str, None]] = {}
        for name, what in found:
            joined.setdefault(name.partition(".")[0], {})[what] = None
        return [(name, " and ".join(meanings)) for name, meanings in joined.items()]


@dataclass(frozen=True)
class Shape:
    """The shape of a run's rows, and the columns they are read from."""

    declared: DataShape
    source: Mapping[str, str]  # our column: the user's column
    optional: tuple[str, ...] = ()  # optional columns that a file has, by our names
    carried: tuple[str, ...] = ()  # numeric columns kept with each row, by our names
    unread: tuple[str, ...] = ()  # the user's columns that nothing reads
    left_out: tuple[str, ...] = ()  # the user's columns that the user left out
    wrap: Wrapping = UNWRAPPED  # what becomes of plain text

    @property
    def kind(self) -> str:
        """Its name."""
        return self.declared.name

    @property
    def has_prompt(self) -> bool:
        """Whether the prompt has columns of its own."""
        return self.declared.prompt is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The user's columns to read, where a file has them."""
        return tuple(self.source.values())

    @property
    def told(self) -> str:
        """Which of the user's columns are read as what."""
        named = [(self.source[name], what) for name, what in self.declared.meanings]
        if not self.declared.prompt:
            named.insert(0, ("what both begin with", "prompt"))
        parts = [self.source[name] for name in self.declared.optional if name in self.optional]
        named[1:1] = [(part, "prompt") for part in parts]
        done = {self.declared.margin, *self.declared.optional}
        done.update(name for name, _ in self.declared.meanings)
        extra = (*self.declared.scores, *self.optional, *self.carried)
        named += [(self.source[n], n) for n in extra if n in self.source and n not in done]
        groups = groupby(dict.fromkeys(named), key=lambda each: each[1])
        joined = [(" and ".join(each for each, _ in group), ours) for ours, group in groups]
        each = ", ".join(one if one == ours else f"{one} -> {ours}" for one, ours in joined)
        return f"{self.kind} rows: {each}"

    @property
    def lacks_scores(self) -> bool:
        """Whether nothing says which completions are good."""
        is_missing = any(name not in self.source for name in self.declared.scores)
        return not self.declared.has_labels and (is_missing or self.declared.good is None)


class Found(NamedTuple):
    """A prompt and its completions; of each its role, and its score where there is one."""

    prompt: Text
    completions: tuple[Text, ...]
    roles: tuple[Role, ...]
    scores: tuple[float | None, ...]
    ahead: float = 0  # of a pair, how far the chosen answer is ahead


def read_row(cells: Cells, one: DataShape) -> Found:
    """What a row says in this shape; raises BadRow."""
    if one.kind == "pair":
        return _read_pair(one, cells)
    assert one.prompt
    prompt = one.prompt(cells)
    answers = one.answers(cells, prompt)
    if one.kind == "label":
        assert one.good
        role = Role.DESIRABLE if one.good(cells) else Role.UNDESIRABLE
        return Found(prompt, answers, (role,), (None,))
    scores = one.good(cells, len(answers)) if one.good else (None,) * len(answers)
    return Found(prompt, answers, (Role.CANDIDATE,) * len(answers), scores)


def read_prompt_alone(cells: Cells, one: DataShape) -> Text:
    """The prompt of a row as `read_row` reads it, whichever of its answers is good."""
    if one.prompt is None:
        first, second = one.answers(cells, None)
        return parts.forked(first, second, one.answers.columns)[0]
    prompt: Text = one.prompt(cells)
    again = _said_again(one, cells, prompt) if one.kind == "pair" else None
    return again[0] if again else prompt


def _read_pair(one: DataShape, cells: Cells) -> Found:
    prompt = one.prompt(cells) if one.prompt else None
    ahead = one.good(cells) if one.good else 1.0
    if ahead == 0:
        raise BadRow("tie", f"{' and '.join(one.answers.columns)}: a tie has no chosen answer")
    if prompt is None:
        first, second = one.answers(cells, None)
        names = [cells(name)[1] for name in one.answers.columns]
        prompt, answers = parts.forked(first, second, names)
    elif again := _said_again(one, cells, prompt):
        prompt, answers = again
    else:
        answers = one.answers(cells, prompt)
    scores: tuple[float | None, ...] = tuple(map(cells.number, one.scores)) or (None, None)
    if ahead < 0:
        answers, scores = answers[::-1], scores[::-1]
    return Found(prompt, answers, PAIR, scores, abs(ahead))


def _said_again(
    one: DataShape, cells: Cells, prompt: Text
) -> tuple[Text, tuple[Text, Text]] | None:
    """The beginning and the ends of two whole conversations in which a prompt of text is said."""
    if not isinstance(prompt, str):
        return None
    found = [cells(name) for name in one.answers.columns]
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


def _reading(how: Callable[..., Any]) -> Callable[..., Read]:
    return lambda *columns: Read(how, columns)


pair, labelled = partial(DataShape, "pair"), partial(DataShape, "label")
scored, single = partial(DataShape, "scores"), partial(DataShape, "score")
given, user, chat = _reading(parts.given), _reading(parts.user), _reading(parts.chat)
all_but_last, last = _reading(parts.all_but_last), _reading(parts.last)
two, each, label = _reading(parts.in_columns), _reading(parts.each), _reading(parts.labelled_as)
strength, second_if = _reading(parts.strength), _reading(parts.second_if)
score = _reading(parts.of_one)
one = two


def instruction(*optional: str) -> Read:
    """An instruction, with the columns beside it that are a part of the prompt."""
    return Read(parts.instruction, ("instruction",), optional)


_CHOSEN, _SAFE = two("chosen", "rejected"), two("response_0", "response_1")
_BOTH = Read(parts.wholes, ("chosen", "rejected"), ("prompt",))
_RATINGS = ("completions.fine-grained_score", "completions.overall_score")
_WON = ("winner_model_a", "winner_model_b", "winner_tie")
_PAIR_SCORES = ("chosen_score", "rejected_score")

SHAPES = (
    pair("paired", given("prompt"), _CHOSEN, scores=_PAIR_SCORES),
    pair("paired", None, _BOTH, scores=_PAIR_SCORES),
    labelled("unpaired", given("prompt"), one("completion"), label("label")),
    scored(
        "scored", given("prompt"), each("completions"), Read(parts.of_each, ()), scores=("scores",)
    ),
    single("scored_long", given("prompt"), one("completion"), score("score")),
    scored(
        "UltraFeedback",
        user("instruction"),
        each("completions.response"),
        Read(parts.first_field, _RATINGS),
    ),
    scored(
        "Nectar",
        given("prompt"),
        each("answers.answer"),
        Read(parts.minus_ranks, ("answers.rank",)),
    ),
    single("HelpSteer", user("prompt"), one("response"), score("helpfulness")),
    single("AlpacaEval", instruction("input"), one("output")),
    pair(
        "UltraFeedback binarized",
        Read(parts.stated, ("prompt", "messages")),
        _CHOSEN,
        scores=_PAIR_SCORES,
    ),
    pair("Orca", user("question"), _CHOSEN, having=("system",)),
    pair("Orca", user("input"), _CHOSEN, having=("system",)),
    pair("Argilla", instruction("input", "history"), two("chosen_response", "rejected_response")),
    pair("StackExchange", user("question"), two("response_j", "response_k")),
    pair("UltraInteract", chat("trajectory"), _CHOSEN),
    pair("axolotl", chat("messages"), _CHOSEN),
    pair("LLaMA-Factory", chat("conversations"), _CHOSEN),
    pair("LLaMA-Factory", Read(parts.instruction, ("instruction", "input"), ("history",)), _CHOSEN),
    labelled("LLaMA-Factory", instruction("input", "history"), one("output"), label("kto_tag")),
    labelled("LLaMA-Factory", all_but_last("messages"), last("messages"), label("kto_tag")),
    labelled(
        "LLaMA-Factory", all_but_last("conversations"), last("conversations"), label("kto_tag")
    ),
    labelled("ShareGPT", all_but_last("conversations"), last("conversations"), label("label")),
    labelled("ms-swift", all_but_last("messages"), last("messages"), label("label")),
    pair("ms-swift", all_but_last("messages"), last("messages", "rejected_response")),
    pair("ms-swift", None, Read(parts.answered, ("messages", "rejected_messages"))),
    pair(
        "OpenAI",
        chat("input.messages"),
        two("preferred_output", "non_preferred_output"),
        tools="input.tools",
    ),
    pair(
        "NeMo RL",
        chat("context"),
        each("completions.completion"),
        Read(parts.lower_rank, ("completions.rank",)),
    ),
    pair(
        "AlpacaFarm",
        instruction("input"),
        two("output_1", "output_2"),
        Read(parts.one_or_two, ("preference",)),
    ),
    pair(
        "SHP", user("history"), two("human_ref_A", "human_ref_B"), Read(parts.first_if, ("labels",))
    ),
    pair(
        "WebGPT",
        user("question.full_text"),
        two("answer_0", "answer_1"),
        Read(parts.higher, ("score_0", "score_1")),
        scores=("score_0", "score_1"),
    ),
    pair(
        "HelpSteer2",
        user("prompt"),
        two("response_1", "response_2"),
        strength("preference_strength"),
        margin="margin",
    ),
    pair(
        "HelpSteer3",
        user("context"),
        two("response1", "response2"),
        strength("overall_preference"),
        margin="margin",
    ),
    pair(
        "arena",
        None,
        Read(parts.conversations, ("conversation_a", "conversation_b")),
        Read(parts.winner, ("winner",)),
    ),
    pair(
        "arena",
        None,
        Read(parts.exchanges, ("response_a", "response_b")),
        Read(parts.flags, _WON),
        having=("prompt",),
    ),
    pair("PKU-SafeRLHF", user("prompt"), _SAFE, second_if("better_response_id")),
    pair("PKU-SafeRLHF", user("prompt"), _SAFE, second_if("safer_response_id")),
)
# A file of prompts alone, as `align sample` reads it.
PROMPTS = single("prompts", given("prompt"), one())
