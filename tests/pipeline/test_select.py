"""align select over judged tables and plain files, and what stage 1 and training make of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from datasets import Dataset

from align.pipeline.object_inputs import with_local_inputs
from align.schemas.config import Config, DataOptions
from align.schemas.samples import Drawing, Prompt
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.storage import objects
from align.stages.storage.fs import sha256_of
from align.stages.storage.locks import owner_lock
from align.stages.storage.tables import TableFolder, read_table
from support.command import align, refusal
from support.stage_one import run

KINDS = ("best_worst", "all_pairs", "labels", "groups")
ANSWERS = [" Blue.", " The sky is far away.", " Grey.", " Blue, mostly."]


def table_of(prompts, answers=ANSWERS, **columns):
    """A judged table; the samples of each prompt have the scores 0.1, 0.2, …"""
    rows = [
        {
            "prompt": prompt,
            "prompt_key": Prompt(as_text(prompt)).key,
            "number": number,
            "completion": answer if isinstance(prompt, str) else said("assistant", answer),
            "finish": "stop",
            "prompt_tokens": 5,
            "completion_tokens": len(answer.split()),
            "answer": "blue",
            "score": (number + 1) / 10,
        }
        for prompt in prompts
        for number, answer in enumerate(answers)
    ]
    return pl.DataFrame(rows).with_columns(pl.col("number").cast(pl.Int32), **columns)


def as_text(prompt):
    return prompt if isinstance(prompt, str) else tuple(prompt)


def said(role, text):
    return [{"role": role, "content": text}]


def judged(folder, table):
    """A folder as align judge leaves it."""
    made = TableFolder.at(str(folder), "judged")
    made.prepare()
    return made.publish(table, made_from={"samples": "0" * 64}, settings={}, counts={})


def selected(*arguments):
    """What was selected, and what was said of it."""
    answer = align("select", *arguments)
    assert answer.code == 0, answer
    return read_table(TableFolder.at("align-selected", "selected"))[1], answer.out


def left_out(said):
    return [line.removeprefix("left out: ") for line in said.splitlines() if "left out" in line]


def records_of(path, columns=None):
    """What stage 1 reads of a file or folder."""
    inputs = open_inputs([str(path)])
    shape = common_shape(inputs, columns or {})
    parsed = [parse_chunk(chunk, shape) for chunk in iter_chunks(inputs, shape.columns)]
    assert not [bad for _, rejected in parsed for bad in rejected]
    return shape.kind, [record for records, _ in parsed for record in records]


def test_a_judged_table_becomes_pairs_that_name_what_they_came_from(here):
    made = judged("judged", table_of(["Sky? ", "Sea? "]))
    table, told = selected("judged")
    assert table.columns == ["prompt", "chosen", "rejected", "chosen_score", "rejected_score"]
    assert table.rows() == [
        ("Sky? ", " Blue, mostly.", " Blue.", 0.4, 0.1),
        ("Sea? ", " Blue, mostly.", " Blue.", 0.4, 0.1),
    ]
    manifest, _ = read_table(TableFolder.at("align-selected", "selected"))
    assert manifest.made_from == {"judged": made.root}
    assert manifest.settings["rows"] == "best_worst"
    assert manifest.settings["length"] == "tokens"
    assert told.splitlines() == [
        "align-selected: 2 pairs of 2 prompts, 8 samples",
        "next: align precompute-ref align-selected",
    ]


def test_every_reason_is_counted_and_shown(here):
    finish = pl.Series(["length", "stop", "stop", "stop"] * 4)
    score = pl.Series([9.0, 1, None, 0.5, 9, 1, 1, 1, 9, None, None, 1, 9, 3, 2, 1], strict=False)
    table = table_of(["a", "b", "c", "d"], finish=finish, score=score)
    table[13, "completion"], table[15, "completion"] = " ", " Grey."
    judged("judged", table)
    rows, told = selected("judged", "--set", "select.min_gap=0.4")
    assert rows.rows() == [
        ("a", " The sky is far away.", " Blue, mostly.", 1, 0.5),
    ]
    assert left_out(told) == [
        "3 samples without a score",
        "1 sample whose text is blank or cannot be read",
        "4 samples cut at max_new_tokens",
        "1 sample with the text of another",
        "2 prompts with fewer than 2 samples left",
        "1 prompt whose pairs are no further apart than min_gap",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_input_gives_equal_bytes(kind, here):
    judged("judged", table_of(["a", "b"]))
    selected("judged", "--rows", kind)
    before = {path.name: sha256_of(path) for path in Path("align-selected").glob("*.*")}
    selected("judged", "--rows", kind)
    assert {path.name: sha256_of(path) for path in Path("align-selected").glob("*.*")} == before
    shutil.rmtree("align-selected")
    selected("judged/judged.parquet", "--rows", kind)
    assert {path.name: sha256_of(path) for path in Path("align-selected").glob("*.*")} == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_chat", [False, True])
def test_stage_one_reads_every_kind(kind, is_chat, here):
    prompts = [said("user", name) if is_chat else name for name in ("a", "b")]
    judged("judged", table_of(prompts))
    table, _ = selected("judged", "--rows", kind)
    read, records = records_of("align-selected")
    assert records_of("align-selected/selected.parquet") == (read, records)
    expected = {"best_worst": "paired", "all_pairs": "paired", "labels": "unpaired"}
    assert read == expected.get(kind, "scored")
    assert len(records) == table.height
    assert {record.is_conversation for record in records} == {is_chat}
    asked = [record.prompt[0]["content"] if is_chat else record.prompt for record in records]
    assert {*asked} == {"a", "b"}
    if kind == "best_worst":
        assert [record.scores for record in records] == [(0.4, 0.1)] * 2
    if kind == "groups":
        assert [record.scores for record in records] == [(0.1, 0.2, 0.3, 0.4)] * 2


def test_tools_and_template_options_reach_stage_one(here):
    tools = json.dumps([{"type": "function", "function": {"name": "look"}}])
    table = table_of(
        [said("user", "a")], tools=pl.lit(tools), chat_template_kwargs=pl.lit('{"thinking": false}')
    )
    judged("judged", table)
    for kind in KINDS:
        selected("judged", "--rows", kind)
        for record in records_of("align-selected")[1]:
            assert record.tools == tuple(json.loads(tools))
            assert record.template_options == {"thinking": False}


def test_a_table_of_text_and_of_conversations_is_read_from_json_text(here):
    chat = json.dumps(said("user", "b"))
    table = table_of(["a", chat])
    answers = [*ANSWERS, *(json.dumps(said("assistant", answer)) for answer in ANSWERS)]
    judged("judged", table.with_columns(completion=pl.Series(answers)))
    for kind in KINDS:
        selected("judged", "--rows", kind)
        records = records_of("align-selected")[1]
        assert {record.is_conversation for record in records} == {False, True}


def test_an_answer_that_stage_one_would_refuse_is_left_out(here):
    table = table_of(["a"])
    table[3, "completion"] = '[{"role": "assistant", "content": "cut'
    judged("judged", table)
    rows, told = selected("judged")
    assert rows["chosen"].to_list() == [" Grey."]
    assert left_out(told) == ["1 sample whose text is blank or cannot be read"]


SCORED = [
    {"prompt": "a", "completions": [" x", " yyyy", " z"], "scores": [1, 3, 2]},
    {"prompt": "b", "completions": [" x", " y"], "scores": [1, 1]},
]


def write_lines(path, rows):
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_scored_rows_of_a_plain_file_are_selected_from(here):
    write_lines("scored.jsonl", SCORED)
    rows, told = selected("scored.jsonl", "--max-length-ratio", 1)
    assert rows.rows() == [("a", " z", " x", 2, 1)]
    assert left_out(told) == ["1 prompt whose pairs are no further apart than min_gap"]
    assert "lengths are in characters" in told
    manifest, _ = read_table(TableFolder.at("align-selected", "selected"))
    assert manifest.made_from == {"data": sha256_of(Path("scored.jsonl"))}


def test_one_row_for_each_completion_is_the_same_data(here):
    whole, apart = "scored.jsonl", "long.jsonl"
    write_lines(whole, SCORED)
    rows = [
        {"prompt": row["prompt"], "completion": completion, "score": score}
        for row in SCORED
        for completion, score in zip(row["completions"], row["scores"], strict=True)
    ]
    write_lines(apart, [*rows[3:4], *rows[:3], *rows[4:]])
    for kind in KINDS[1:]:
        expected = selected(whole, "--rows", kind)[0]
        assert selected(apart, "--rows", kind)[0].sort("prompt").equals(expected)


def test_text_of_a_plain_file_that_is_left_behind_is_warned_of(here, caplog):
    persona = "You are a pirate, and you say so."
    write_lines("scored.jsonl", [{**row, "persona": persona, "id": "a1"} for row in SCORED])
    for columns, told in (((), ["persona"]), (("--map", "persona="), [])):
        caplog.clear()
        selected("scored.jsonl", *columns)
        lines = [record.getMessage() for record in caplog.records if record.name == "align"]
        assert [name for name in ("persona", "id") if f"{name!r}" in "".join(lines)] == told


def test_columns_of_a_plain_file_may_have_other_names(here):
    renamed = [{"q": row["prompt"], "a": row["completions"], "r": row["scores"]} for row in SCORED]
    write_lines("renamed.jsonl", renamed)
    maps = [word for name in ("prompt=q", "completions=a", "scores=r") for word in ("--map", name)]
    assert selected("renamed.jsonl", *maps)[0].rows() == [("a", " yyyy", " x", 3, 1)]


def test_conversations_with_calls_of_tools_stay_whole(here):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    prompt = [*said("user", "a"), {"role": "assistant", "tool_calls": [call]}, *said("tool", "b")]
    tools = [{"type": "function", "function": {"name": "look"}}]
    write_lines("scored.jsonl", [{**SCORED[0], "prompt": prompt, "tools": tools}])
    for kind in KINDS:
        selected("scored.jsonl", "--rows", kind)
        for record in records_of("align-selected")[1]:
            assert [*record.prompt] == prompt
            assert record.tools == tuple(tools)


ULTRAFEEDBACK = [
    {
        "source": "evol_instruct",
        "instruction": f"Question {at}",
        "models": ["m1", "m2", "m3"],
        "completions": [
            {
                "response": f"Answer {number}",
                "model": f"m{number}",
                "critique": "…",
                "fine-grained_score": fine,
                "overall_score": overall,
            }
            for number, (fine, overall) in enumerate([(4.75, 7.0), (1.5, 10.0), (None, 5.0)])
        ],
    }
    for at in range(2)
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_ultrafeedback_becomes_conversations(ending, here):
    pl.DataFrame(ULTRAFEEDBACK).write_parquet("data.parquet")
    write_lines("data.jsonl", ULTRAFEEDBACK)
    table, _ = selected(f"data.{ending}", "--rows", "groups")
    assert table.row(0) == (
        said("user", "Question 0"),
        [said("assistant", f"Answer {number}") for number in range(3)],
        [4.75, 1.5, 5.0],
    )
    assert records_of("align-selected")[0] == "scored"
    pairs, _ = selected(f"data.{ending}", "--map", "score=overall_score")
    assert pairs["chosen"].to_list() == [said("assistant", "Answer 1")] * 2
    fine, told = selected(f"data.{ending}", "--map", "score=fine-grained_score")
    assert fine["chosen"].to_list() == [said("assistant", "Answer 0")] * 2
    assert left_out(told) == ["2 samples without a score"]


DRAWN = {"temperature": 0.7, "top_p": 1.0, "top_k": 20}


def sampled(folder, **settings):
    made = TableFolder.at(str(folder), "samples")
    made.prepare()
    table = table_of(["Sky? ", "Sea? "]).drop("score")
    return made.publish(table, made_from={}, settings=settings, counts={})


def from_samples(folder):
    """Judges and selects them, as a judged table before and after they were known."""
    judge_by_words(folder)
    selected("align-judged", "--rows", "groups")
    return [TableFolder.at(f"align-{kind}", kind).find() for kind in ("judged", "selected")]


def test_how_samples_were_drawn_travels_into_the_cache_and_no_root(here, to):
    sampled("samples")
    plain = from_samples("samples")
    assert [table.sampling for table in plain] == [None, None]
    data = DataOptions(files=["align-selected"])
    before = run(replace(to(output="before"), data=data)).manifest
    sampled("samples", **DRAWN)
    tables = from_samples("samples")
    assert [table.sampling for table in tables] == [Drawing(**DRAWN)] * 2
    Path("plain.jsonl").write_text('{"prompt": "a", "completions": ["b", "c"], "scores": [1, 2]}')
    after = run(replace(to(output="after"), data=data)).manifest
    assert after.sampling == (Drawing(**DRAWN),)
    assert (after.root, before.sampling) == (before.root, ())
    both = replace(data, files=["plain.jsonl", "align-selected/selected.parquet"])
    joined = run(replace(to(output="joined"), data=both)).manifest
    drawn = dict(zip([entry.name for entry in joined.inputs], joined.sampling, strict=True))
    assert drawn == {"plain.jsonl": None, "selected.parquet": Drawing(**DRAWN)}


def test_a_table_that_its_manifest_does_not_name_is_data_of_unknown_sampling(here, to):
    sampled("samples", **DRAWN)
    from_samples("samples")
    rows = pl.read_parquet("align-selected/selected.parquet")
    rows.head(1).write_parquet("align-selected/selected.parquet")
    config = replace(to(kl_pairs=0), data=DataOptions(files=["align-selected"]))
    assert run(config).manifest.sampling == ()


def test_an_output_that_another_process_works_in_is_left_alone(here):
    judged("judged", table_of(["a", "b"]))
    selected("judged")
    output = TableFolder.at("align-selected", "selected")
    before = sha256_of(output.file), sha256_of(output.manifest)
    with owner_lock(output, "select"):
        assert "is in use by process" in refusal(75, "select", "judged", "--rows", "labels")
    assert (sha256_of(output.file), sha256_of(output.manifest)) == before


@pytest.mark.parametrize("given", ["nowhere", "nowhere.jsonl", "unscored.jsonl"])
def test_an_input_that_is_refused_leaves_no_output(given, here):
    write_lines("unscored.jsonl", [{"prompt": "a", "completions": [" x", " y"]}])
    refusal(2, "select", given)
    assert not Path("align-selected").exists()


def test_too_many_bad_rows_of_a_plain_file_are_refused(here):
    write_lines("scored.jsonl", [*SCORED, {"prompt": "", "completions": [" x"], "scores": [1]}])
    message = refusal(3, "select", "scored.jsonl")
    assert "scored.jsonl: 1 of 3 rows cannot be used (1 empty_prompt)" in message
    assert "row 2" in message
    _, told = selected("scored.jsonl", "--max-bad-frac", 0.5)
    assert "1 row that cannot be read" in told


NOT_SCORED = {
    "pairs": ({"prompt": "a", "chosen": " x", "rejected": " y"}, "holds paired rows"),
    "labels": ({"prompt": "a", "completion": " x", "label": True}, "holds unpaired rows"),
    "no scores": ({"prompt": "a", "completions": [" x"]}, "2 samples without a score"),
    "alpaca_eval": (
        {"instruction": "a", "output": "x", "generator": "m"},
        "2 samples without a score",
    ),
}


@pytest.mark.parametrize("name", NOT_SCORED)
def test_a_plain_file_that_has_no_scores_is_refused(name, here):
    row, expected = NOT_SCORED[name]
    write_lines("data.jsonl", [row, row])
    assert expected in refusal(2, "select", "data.jsonl")


def judge_by_words(samples):
    """Judges by the number of words."""
    Path("counts_words.py").write_text("def grade(prompt, text, row): return len(text.split())\n")
    by = ("--by", "function", "--function", "counts_words:grade", "--no-mlflow")
    answer = align("judge", samples, *by)
    assert answer.code == 0, answer


def test_answers_as_alpaca_eval_has_them_are_judged_and_selected_from(here):
    rows = [
        {"instruction": "a", "output": "one", "generator": "m1"},
        {"instruction": "b", "output": "alone", "generator": "m1"},
        {"instruction": "a", "output": "one two", "generator": "m2"},
    ]
    Path("outputs.json").write_text(json.dumps(rows))
    judge_by_words("outputs.json")
    table, told = selected("align-judged")
    assert table.rows() == [
        (said("user", "a"), said("assistant", "one two"), said("assistant", "one"), 2, 1)
    ]
    assert left_out(told) == ["1 prompt with fewer than 2 samples left"]
    manifest, judged_table = read_table(TableFolder.at("align-judged", "judged"))
    assert manifest.made_from["samples"] == sha256_of(Path("outputs.json"))
    assert judged_table["number"].to_list() == [0, 1, 0]


def test_scored_rows_are_judged_anew_and_others_not_at_all(here):
    rows = [{"prompt": "a", "completions": [" x", " y y y", " z z"], "scores": [9, 1, 5]}]
    write_lines("scored.jsonl", rows)
    judge_by_words("scored.jsonl")
    assert selected("align-judged")[0].rows() == [("a", " y y y", " x", 3, 1)]
    write_lines("paired.jsonl", [{"prompt": "a", "chosen": " x", "rejected": " y"}])
    assert "holds paired rows" in refusal(2, "judge", "paired.jsonl", "--by", "exact")


def test_no_row_is_an_error_that_says_why(here):
    judged("judged", table_of(["a", "b"], finish=pl.lit("length")))
    message = refusal(2, "select", "judged")
    assert "no row is left of 2 prompts, 8 samples" in message
    assert "8 samples cut at max_new_tokens" in message
    assert not Path("align-selected/selected.parquet").exists()
    rows, _ = selected("judged", "--keep-cut")
    assert rows.height == 2


REFUSED = {
    "select.min_gap is of pairs": ("--rows", "labels", "--min-gap", 1),
    "select.max_length_ratio is of pairs": ("--rows", "groups", "--max-length-ratio", 2),
    "expected at least 1": ("--max-length-ratio", 0.5),
    "expected mean, median or a number": ("--rows", "labels", "--set", "select.threshold=most"),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_settings_that_make_no_sense_are_refused(expected, here):
    judged("judged", table_of(["a"]))
    assert expected in refusal(2, "select", "judged", *REFUSED[expected])


def test_only_a_finished_judged_table_is_selected_from(here):
    Path("empty").mkdir()
    assert "not a finished table of judged samples" in refusal(2, "select", "empty")
    judged("judged", table_of(["a"]))
    selected("judged")
    assert "holds selected rows, not judged samples" in refusal(
        2, "select", "align-selected", "--output", "x"
    )
    assert "is not a selected folder" in refusal(2, "select", "judged", "--output", "judged")
    Path("judged/judged.parquet").write_bytes(b"other")
    assert "is not what _manifest.json names" in refusal(5, "select", "judged")


def test_a_table_in_a_store_gives_the_rows_of_one_on_a_disk(bucket, here):
    table = table_of(["a", "b"])
    judged("judged", table)
    judged(f"{bucket}/judged", table)
    selected("judged")
    answer = align("select", f"{bucket}/judged", "--output", f"{bucket}/selected")
    assert answer.code == 0, answer
    on_disk, in_store = (
        read_table(TableFolder.at(root, "selected"))
        for root in ("align-selected", f"{bucket}/selected")
    )
    assert in_store[0] == on_disk[0]
    assert in_store[1].equals(on_disk[1])
    data = replace(Config().data, files=[f"{bucket}/selected"])
    (copied,) = with_local_inputs(replace(Config(), data=data)).data.files
    assert records_of(copied) == records_of("align-selected")
    over = refusal(2, "select", f"{bucket}/judged", "--output", f"{bucket}/judged")
    assert "holds judged samples, not selected rows" in over
    assert read_table(TableFolder.at(f"{bucket}/judged", "judged"))[1].equals(table)


def test_scored_rows_in_a_store_are_selected_from(bucket, here):
    write_lines("scored.jsonl", SCORED)
    objects.put(bucket / "data" / "scored.jsonl", Path("scored.jsonl"))
    expected, _ = selected("scored.jsonl")
    assert selected(f"{bucket}/data/scored.jsonl")[0].equals(expected)


def test_a_damaged_manifest_is_written_anew(here):
    judged("judged", table_of(["a"]))
    before, _ = selected("judged")
    Path("align-selected/_manifest.json").write_text("{")
    after, _ = selected("judged")
    assert after.equals(before)


# Rows, how many branches each has with its mismatched ones, and what the first step begins with:
# KTO at 0.5, where the policy is the reference; of a group the mean of its scores.
METHODS = {
    "kto": ("labels", (), (32, 64), ("loss", 0.5)),
    "grpo": ("groups", ("--token-logps", "--kl-pairs", 0), (8, 32), ("rewards/scores", 0.25)),
}


@pytest.mark.parametrize("method", METHODS)
def test_training_takes_what_was_selected(method, server, world, here):
    kind, more, (rows, branches), (metric, expected) = METHODS[method]
    questions = pl.read_parquet(world.data.paired)["prompt"].unique(maintain_order=True)[:8]
    judged("judged", table_of(questions.to_list()))
    selected("judged", "--rows", kind)
    made = server.run(
        *("precompute-ref", here / "align-selected", "--model", world.model, "--no-mlflow"),
        *("--output", "cache", *more),
        cwd=here,
    )
    assert f"cache: {rows} rows, {branches} branches" in made.out, made
    trained = server.run(
        *("train", "--method", method, "--cache", "cache", "--batch-size", 8, "--max-steps", 1),
        "--no-mlflow",
        cwd=here,
    )
    assert trained.code == 0, trained
    (first,) = map(json.loads, Path("align-run/metrics.jsonl").read_text().splitlines())
    assert first[metric] == pytest.approx(expected, abs=1e-5)


# As TRL's page of formats has them: the columns of preference and unpaired data.
TRL = {"best_worst": ("prompt", "chosen", "rejected"), "labels": ("prompt", "completion", "label")}


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_datasets_library_reads_the_columns_that_trl_expects(is_chat, here):
    prompt = said("user", "a") if is_chat else "a"
    judged("judged", table_of([prompt]))
    file = str(here / "align-selected" / "selected.parquet")
    for kind, names in TRL.items():
        selected("judged", "--rows", kind)
        (row, *_) = Dataset.from_parquet(file, cache_dir=str(here / f"cache-{kind}"))
        texts = [row[name] for name in names if name != "label"]
        assert texts[0] == prompt
        assert kind != "labels" or isinstance(row["label"], bool)
        for text in texts:
            assert isinstance(text, list) == is_chat
            assert not is_chat or [*text[0]] == ["role", "content"]
