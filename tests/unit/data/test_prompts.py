"""Columns that nothing reads are named, or refused where a row would mean something else."""

import pytest

from align.schemas.errors import UsageError
from align.stages.data.cells import UNWRAPPED, Wrapping
from align.stages.data.columns import common_shape, not_read
from align.stages.data.files import open_inputs
from align.stages.data.text_rows import read_prompts
from support.read_rows import user, write_rows

ENDINGS = ("parquet", "arrow", "jsonl", "json", "csv")


def opened(*paths, **columns):
    """The files' shape, as every command takes it."""
    inputs = open_inputs(list(map(str, paths)))
    return common_shape(inputs, columns)


INSTRUCTION = {"instruction": "Say.", "completion": "a", "label": True}
PAIR = {"prompt": "Which?", "chosen": "this", "rejected": "that"}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("row", "column", "mapped"),
    [
        (INSTRUCTION, "input", {"prompt": "instruction"}),
        (INSTRUCTION, "history", {"prompt": "instruction"}),
        (PAIR, "images", {}),
    ],
)
def test_a_part_of_a_prompt_and_media_are_refused_where_they_are_filled(
    tmp_path, ending, row, column, mapped
):
    rows = [row | {column: ""} for _ in range(1500)]
    path = tmp_path / f"a.{ending}"
    opened(write_rows(path, rows), **mapped)
    rows[1234][column] = "7"
    with pytest.raises(UsageError, match=rf"a\.{ending}.*'{column}'"):
        opened(write_rows(path, rows), **mapped)
    assert opened(path, **mapped, **{column: ""}).unread == ()


@pytest.mark.parametrize("ending", ENDINGS)
def test_columns_that_nothing_reads_are_named(tmp_path, ending):
    more = {"id": "a1", "source": "math", "note": "some words that nobody reads", "n": 3}
    path = write_rows(tmp_path / f"a.{ending}", [PAIR | more | {"margin": 1}] * 3)
    shape = opened(path, source="")
    assert shape.unread == ("id", "note", "n")
    assert all(repr(name) in not_read(shape.unread) for name in shape.unread)


def test_a_column_of_one_of_several_files_is_read_or_left_out_in_all(tmp_path):
    first = write_rows(tmp_path / "a.jsonl", [PAIR])
    second = write_rows(tmp_path / "b.jsonl", [PAIR | {"system_prompt": "Be kind."}])
    assert opened(first, second).unread == ("system_prompt",)
    assert opened(first, second, system_prompt="").unread == ()
    shape = opened(first, second, system="system_prompt")
    assert (shape.source["system"], shape.optional, shape.unread) == (
        "system_prompt",
        ("system",),
        (),
    )


SYSTEM = {"role": "system", "content": "be kind"}


@pytest.fixture
def read(tmp_path):
    """The prompts of files with these rows."""

    def of_files(*files, wrap=UNWRAPPED, **columns):
        for number, rows in enumerate(files):
            write_rows(tmp_path / f"{number}.jsonl", rows)
        return read_prompts(open_inputs([str(tmp_path)]), columns, wrap)

    return of_files


SHP = {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 1}
BARE = {"chosen": "a b", "rejected": "a c"}
FORKED = BARE | {"margin": 1, "x": 1, "answer": "b"}
LATE = {"answer": "b", "number": 3, "score_chosen": 2}
NAMED = {"prompt": "a", "number": 3, "finish": "stop", "x": 1, "y": 2}
# Files of rows, and what is left out; the texts of prompts, what they carry, and may not carry.
READ = {
    "a prompt alone": ([[{"prompt": "a"}]], {}, ["a"], [{}]),
    "an answer": ([[{"prompt": "a", "completion": "b"}]], {}, ["a"], [{}]),
    "an empty pair": ([[{"prompt": "a", "chosen": None, "rejected": ""}]], {}, ["a"], [{}]),
    "answers of its own": (
        [[{"prompt": "a", "answers": ["4", "four"]}]],
        {},
        ["a"],
        [{"answers": ["4", "four"]}],
    ),
    "a set that stage 1 reads": (
        [[SHP | {"system": "be kind"}]],
        {},
        [(SYSTEM, user("a"))],
        [{"human_ref_A": "b", "human_ref_B": "c", "labels": 1}],
    ),
    "two files": (
        [[NAMED], [{"prompt": "b", "z": 3}]],
        {"x": ""},
        ["a", "b"],
        [{"y": 2}, {"z": 3}],
        ("number", "finish"),
    ),
    "pairs without a prompt": ([[FORKED, FORKED]], {"x": ""}, ["a"] * 2, [{"answer": "b"}] * 2),
    "a key that the first rows lack": (
        [[*[{"prompt": "a"}] * 200, {"prompt": "a"} | LATE]],
        {},
        ["a"] * 201,
        [{}] * 200 + [{"answer": "b"}],
        ("number",),
    ),
    "a key that the first pairs lack": (
        [[*[BARE] * 200, BARE | LATE]],
        {},
        ["a"] * 201,
        [{}] * 200 + [{"answer": "b"}],
        ("number",),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_row_gives_its_prompt_and_carries_what_is_no_preference_data(read, name):
    files, columns, texts, carried, *not_carried = READ[name]
    found = read(*files, **columns)
    assert [prompt.text for prompt in found.prompts] == texts
    assert [prompt.carried for prompt in found.prompts] == carried
    assert (found.not_carried, found.rejected) == (not_carried[0] if not_carried else (), [])


def test_a_prompt_keeps_its_system_message_tools_and_options(read):
    tool = {"type": "function", "function": {"name": "f"}}
    row = {"system": "be kind", "tools": [tool], "chat_template_kwargs": {"thinking": False}}
    chat = read([row | {"prompt": [user("hi")], "answer": 4}])
    text = read([row | {"prompt": "hi", "answer": 4}], wrap=Wrapping(True))
    for (prompt,) in (chat.prompts, text.prompts):
        assert prompt.text == (SYSTEM, user("hi"))
        assert (prompt.tools, prompt.template_options) == ((tool,), {"thinking": False})
        assert prompt.carried == {"answer": 4}


def test_unusable_prompts_are_rejected_with_a_reason(read):
    for rows, reasons in (
        ([{"prompt": "a"}, {"prompt": " "}, {"prompt": None}], {1: "empty_prompt", 2: "schema"}),
        ([{"prompt": "a"}, {"prompt": 3}], {1: "schema"}),
        ([FORKED, FORKED | {"answer": "\ud800"}], {1: "schema"}),
    ):
        found = read(rows)
        assert ([prompt.text for prompt in found.prompts], found.rows_in) == (["a"], len(rows))
        assert {bad.row: bad.reason for bad in found.rejected} == reasons


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"instruction": "a", "answer": "b"}, "'instruction'.*--map prompt="),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "'question'.*--map prompt="),
        ({"prompt": "What is this?", "images": ["a.png"]}, "'images'"),
    ],
)
def test_rejects_a_file_without_prompts_or_with_images(read, row, named):
    with pytest.raises(UsageError, match=rf"0\.jsonl.*{named}"):
        read([row])
