"""align select over judged tables and plain files, and what stage 1 and training make of it."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import polars as pl

from align.schemas.data_options import DataOptions
from align.schemas.samples import Distribution, Prompt
from align.stages.data.columns import common_shape
from align.stages.data.files import open_inputs
from align.stages.data.text_rows import read_text_rows
from align.stages.storage.disk.fs import sha256_of
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.tables import TableFolder, read_table
from support.command import refusal, success
from support.read_rows import parted
from support.stage_one import run

# What each is to stage 1, and its columns, as TRL's page of formats has them for the first three.
PAIR = ["prompt", "chosen", "rejected", "chosen_score", "rejected_score"]
KINDS = {
    "best_worst": ("paired", PAIR),
    "all_pairs": ("paired", PAIR),
    "labels": ("unpaired", ["prompt", "completion", "label"]),
    "groups": ("scored", ["prompt", "completions", "scores"]),
}
ANSWERS = [" Blue.", " The sky is far away.", " Grey.", " Blue, mostly."]


def table_of(prompts, **columns):
    """A judged table; the samples of each prompt have the scores 0.1, 0.2, …"""
    rows = [
        {
            "prompt": prompt,
            "prompt_key": Prompt(prompt if isinstance(prompt, str) else tuple(prompt)).key,
            "number": number,
            "completion": answer if isinstance(prompt, str) else said("assistant", answer),
            "finish": "stop",
            "completion_tokens": len(answer.split()),
            "score": (number + 1) / 10,
        }
        for prompt in prompts
        for number, answer in enumerate(ANSWERS)
    ]
    return pl.DataFrame(rows).with_columns(pl.col("number").cast(pl.Int32), **columns)


def said(role, text):
    return [{"role": role, "content": text}]


def judged(folder, table, *, kind="judged", sampling=None):
    """A folder as align judge, or another verb, leaves it."""
    made = TableFolder.at(str(folder), kind)
    made.prepare()
    of = {"samples": "0" * 64}
    return made.publish(table, made_from=of, settings={}, counts={}, sampling=sampling)


def selected(*arguments):
    """What was selected, and its manifest."""
    success("select", *arguments)
    manifest, table = read_table(TableFolder.at("align-selected", "selected"))
    return table, manifest


def records_of(path):
    """What stage 1 reads of a file or folder."""
    inputs = open_inputs([str(path)])
    shape = common_shape(inputs, {})
    records, rejected = parted(read_text_rows(inputs, shape))
    assert not rejected
    return shape.name, records


def test_a_judged_table_becomes_pairs_that_name_what_they_came_from(here):
    made = judged("judged", table_of(["Sky? ", "Sea? "]))
    table, manifest = selected("judged")
    assert table.rows() == [
        ("Sky? ", " Blue, mostly.", " Blue.", 0.4, 0.1),
        ("Sea? ", " Blue, mostly.", " Blue.", 0.4, 0.1),
    ]
    assert manifest.made_from == {"judged": made.root}
    assert (manifest.settings["rows"], manifest.settings["length"]) == ("best_worst", "tokens")
    Path("align-selected/selected.parquet").write_text("{")  # damaged, it is written anew
    assert selected("judged")[0].equals(table)


TOOLS = [{"type": "function", "function": {"name": "look"}}]
GIVEN = {"tools": json.dumps(TOOLS), "chat_template_kwargs": '{"thinking": false}'}


def test_stage_one_reads_every_kind_of_rows(here):
    chat = [said("user", name) for name in ("a", "b")]
    answers = [*ANSWERS, *(json.dumps(said("assistant", answer)) for answer in ANSWERS)]
    given = {name: pl.lit(value) for name, value in GIVEN.items()}
    tables = {
        (False,): table_of(["a", "b"]),
        (True,): table_of(chat, **given),
        (False, True): table_of(["a", json.dumps(chat[1])], completion=pl.Series(answers)),
    }
    for (are_chat, table), (kind, (shape, columns)) in product(tables.items(), KINDS.items()):
        judged("judged", table)
        rows, _ = selected("judged", "--rows", kind)
        read, records = records_of("align-selected")
        assert rows.columns == [*columns, *(GIVEN if are_chat == (True,) else ())]
        assert (read, len(records)) == (shape, rows.height)
        assert {record.is_conversation for record in records} == {*are_chat}
        for one in records:
            assert one.prompt in ("a", "b", *map(tuple, chat))
            if are_chat == (True,):
                assert (one.tools, one.template_options) == ((*TOOLS,), {"thinking": False})
        file = Path("align-selected/selected.parquet")
        before = file.read_bytes()
        assert records_of(file) == (read, records)
        shutil.rmtree("align-selected")
        selected("judged/judged.parquet", "--rows", kind)
        assert file.read_bytes() == before


SCORED = [
    {"prompt": "a", "completions": [" x", " yyyy", " z"], "scores": [1, 3, 2]},
    {"prompt": "b", "completions": [" x", " y"], "scores": [1, 1]},
]


def write_lines(path, rows):
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_scored_rows_of_a_plain_file_are_selected_from_in_any_form(here, caplog):
    write_lines("scored.jsonl", [{**row, "id": "a1"} for row in SCORED])
    rows, manifest = selected("scored.jsonl", "--max-length-ratio", 1)
    assert rows.rows() == [("a", " z", " x", 2, 1)]
    assert (manifest.counts["too_near"], manifest.settings["length"]) == (1, "characters")
    # Another name, and text that is left behind.
    persona = {"persona": "You are a pirate, always."}
    rows = [{("q" if name == "prompt" else name): row[name] for name in row} for row in SCORED]
    write_lines("renamed.jsonl", [row | persona for row in rows])
    assert selected("renamed.jsonl", "--map", "prompt=q")[0].rows() == [("a", " yyyy", " x", 3, 1)]
    assert "'persona'" in caplog.text
    # One row for each completion.
    rows = [
        {"prompt": row["prompt"], "completion": completion, "score": score}
        for row in SCORED
        for completion, score in zip(row["completions"], row["scores"], strict=True)
    ]
    write_lines("long.jsonl", [*rows[3:4], *rows[:3], *rows[4:]])
    expected = selected("scored.jsonl", "--rows", "groups")[0]
    assert selected("long.jsonl", "--rows", "groups")[0].sort("prompt").equals(expected)


def test_a_prompt_with_other_options_of_the_template_is_another(here):
    options = ['{"thinking": false}', '{"thinking": true}']
    row = {**SCORED[0], "prompt": said("user", "a")}
    write_lines("scored.jsonl", [row | {"chat_template_kwargs": one} for one in options])
    rows, _ = selected("scored.jsonl")
    assert rows["chat_template_kwargs"].to_list() == options


def test_ultrafeedback_becomes_conversations(here):
    scores = [(4.75, 7.0), (1.5, 10.0), (None, 5.0)]
    completions = [
        {"response": f"Answer {at}", "fine-grained_score": fine, "overall_score": overall}
        for at, (fine, overall) in enumerate(scores)
    ]
    rows = {"instruction": ["Question"], "models": [["m"]], "completions": [completions]}
    pl.DataFrame(rows).write_parquet("data.parquet")
    answers = [said("assistant", f"Answer {number}") for number in range(3)]
    table, _ = selected("data.parquet", "--rows", "groups")
    assert table.rows() == [(said("user", "Question"), answers, [4.75, 1.5, 5.0])]
    assert selected("data.parquet")[0]["chosen"].to_list() == [answers[2]]


DRAWN = Distribution(temperature=0.7, top_p=1.0, top_k=20)


def from_samples(sampling):
    """Samples, judged by their number of words and selected from: the last two tables."""
    unscored = table_of(["Sky? ", "Sea? "]).drop("score")
    judged("samples", unscored, kind="samples", sampling=sampling)
    judge_by_words("samples")
    selected("align-judged", "--rows", "groups")
    return [TableFolder.at(f"align-{kind}", kind).find() for kind in ("judged", "selected")]


def judge_by_words(samples):
    Path("counts_words.py").write_text("def grade(prompt, text, row): return len(text.split())\n")
    by = ("--by", "function", "--function", "counts_words:grade", "--no-mlflow")
    success("judge", samples, *by)


def test_how_samples_were_drawn_travels_into_the_cache(here, to):
    assert [table.sampling for table in from_samples(None)] == [None, None]

    def cache(output, *files):
        files = [*files] or ["align-selected"]
        return run(replace(to(output=output, kl_pairs=0), data=DataOptions(files=files))).manifest

    before = cache("before")
    # A judged table before and after they were known.
    assert [table.sampling for table in from_samples(DRAWN)] == [DRAWN] * 2
    after = cache("after")
    assert after.sampling == (DRAWN,)
    assert before.sampling == ()
    write_lines("plain.jsonl", SCORED)
    joined = cache("joined", "plain.jsonl", "align-selected/selected.parquet")
    assert {*joined.sampling} == {None, DRAWN}


# Words of a command, and what its refusal names.
REFUSED = {
    ("nowhere",): ("nowhere",),
    ("empty",): ("judged.parquet",),
    ("pairs.jsonl",): ("pairs.jsonl", "paired"),
    ("unscored.jsonl",): ("2 samples", "score"),
    ("cut",): ("2 prompts", "8 samples"),
    ("samples",): ("samples", "judged"),
    ("judged", "--output", "judged"): ("judged", "selected"),
    ("judged", "--rows", "labels", "--min-gap", 1): ("select.min_gap",),
    ("judged", "--max-length-ratio", 0.5): ("select.max_length_ratio", "0.5"),
    ("judged", "--set", "select.threshold=most"): ("select.threshold", "most"),
}


def test_what_is_refused_leaves_no_output_or_the_one_that_was_there(here):
    Path("empty").mkdir()
    write_lines("pairs.jsonl", [{"prompt": "a", "chosen": " x", "rejected": " y"}])
    write_lines("unscored.jsonl", [{"prompt": "a", "completions": [" x", " y"]}])
    judged("judged", table_of(["a"]))
    judged("cut", table_of(["a", "b"], finish=pl.lit("length")))
    judged("samples", table_of(["a"]), kind="samples")
    for words, names in REFUSED.items():
        refusal(2, "select", *words, names=names)
        assert not Path("align-selected").exists(), words
    assert selected("cut", "--keep-cut")[0].height == 2
    output = TableFolder.at("align-selected", "selected")
    before = sha256_of(output.file)
    with owner_lock(output.root, "select"):
        refusal(75, "select", "judged", "--rows", "labels", names=("align-selected",))
    write_lines("bad.jsonl", [*SCORED, {"prompt": "", "completions": [" x"], "scores": [1]}])
    refusal(3, "select", "bad.jsonl", names=("row 2",))
    assert sha256_of(output.file) == before
    assert selected("bad.jsonl", "--max-bad-frac", 0.5)[1].counts["unusable"] == 1
    Path("judged/judged.parquet").write_bytes(b"other")
    refusal(5, "select", "judged", names=("judged.parquet",))


def test_alpaca_eval_and_scored_rows_are_judged_and_selected(here):
    answers = {"m1": ("a", "one"), "m2": ("b", "alone"), "m3": ("a", "one two")}
    rows = [
        {"instruction": asked, "output": text, "generator": name}
        for name, (asked, text) in answers.items()
    ]
    Path("outputs.json").write_text(json.dumps(rows))
    judge_by_words("outputs.json")
    answers = said("assistant", "one two"), said("assistant", "one")
    assert selected("align-judged")[0].rows() == [(said("user", "a"), *answers, 2, 1)]
    manifest, judged_table = read_table(TableFolder.at("align-judged", "judged"))
    assert manifest.made_from["samples"] == sha256_of(Path("outputs.json"))
    assert judged_table["number"].to_list() == [0, 1, 0]
    # Scored rows are judged anew.
    rows = [{"prompt": "a", "completions": [" x", " y y y", " z z"], "scores": [9, 1, 5]}]
    write_lines("scored.jsonl", rows)
    judge_by_words("scored.jsonl")
    assert selected("align-judged")[0].rows() == [("a", " y y y", " x", 3, 1)]
