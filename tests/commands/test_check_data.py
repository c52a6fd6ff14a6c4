"""`align check` beside the cache that `precompute-ref` makes of the same data."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.precompute.check_data import check_data
from align.schemas.data_options import DataOptions
from align.schemas.errors import BadDataError, UsageError
from align.schemas.rows import Role
from align.stages.report.cache_summary import summarize
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from support.read_rows import bot, user, write_rows
from support.refusals import refuses
from support.stage_one import Silent, run

SEVERAL = [bot("A one"), user("and?"), bot("A two")]
PAIR = {"chosen": SEVERAL, "rejected": [bot("B")]}
ROWS = [
    *(
        {"prompt": [user(f"Q {row}")], "chosen": SEVERAL, "rejected": [bot("B")]}
        for row in range(6)
    ),
    PAIR | {"prompt": [user("Q 5")]},  # again
    PAIR | {"prompt": [user("Q 6")], "chosen": [bot("")]},
    {"prompt": [user("Q 7")], "chosen": [bot("B") | {"loss": False}], "rejected": [bot("C")]},
]


@pytest.fixture
def conversations(config, tmp_path):
    """The config of such rows, of which two cannot be used."""
    path = write_rows(tmp_path / "turns.jsonl", ROWS)
    return replace(config, data=DataOptions(files=[path], max_bad_frac=0.5))


def test_check_reports_what_the_cache_then_holds(conversations):
    checked = check_data(conversations, progress=Silent())
    manifest = run(replace(conversations, cache=replace(conversations.cache, kl_pairs=0))).manifest
    folder = Cache(Path(conversations.cache.output))
    assert folder.manifest() == manifest
    summary = summarize(folder)
    assert (checked.rows_in, checked.usable) == (manifest.rows_in, manifest.rows)
    assert checked.reasons == manifest.reasons == {"empty_completion": 1, "nothing_learned": 1}
    repeats = manifest.notes["rows_that_repeat_another_row"]
    assert checked.usable - len(checked.seen) == repeats == 1
    assert {role.name.lower(): count for role, count in checked.roles.items()} == {
        name: role["branches"] for name, role in summary["roles"].items()
    }
    lengths = {
        name: sum(int(part.sum()) for part in parts) for name, parts in checked.lengths.items()
    }
    assert lengths["prompt"] == summary["prompts"]["tokens"]
    for name, role in summary["roles"].items():
        assert (lengths[name], lengths[f"{name}, learned"]) == (role["tokens"], role["learned"])
    text = "\n".join(map(str, checked.lines()))
    assert "(not learned: " in text
    assert "turns.jsonl row 7: empty_completion" in text
    assert "data.wrap" not in text
    assert not unfinished_work(folder)


def test_the_command_that_follows_reads_the_data_in_the_same_way(conversations, tmp_path):
    data = replace(conversations.data, map={"chosen": "good one"}, wrap="chat", carry=["weight"])
    rows = [{"prompt": f"Q {n}", "good one": "yes", "rejected": "no", "weight": 1} for n in (1, 2)]
    data = replace(data, files=[write_rows(tmp_path / "good ones.jsonl", rows)])
    config = replace(conversations, data=data)
    *_, last = check_data(config, progress=Silent()).lines()
    _, *words = shlex.split(last)
    assert words == [
        *("align", "precompute-ref", *data.files, "--model", config.model.path),
        *("--map", "chosen=good one", "--set", 'data.carry=["weight"]'),
        *("--set", "data.wrap=chat", "--max-bad-frac", "0.5", "--max-length", "256"),
    ]


def test_check_names_the_template_that_plain_text_does_not_use(conversations, world):
    model = replace(conversations.model, path=str(world.model))
    files = [str(world.data.paired)]
    for wrap, count in (("auto", 1), ("chat", 0), ("none", 0)):
        config = replace(conversations, model=model, data=DataOptions(files=files, wrap=wrap))
        lines = map(str, check_data(config, progress=Silent()).lines())
        found = [line for line in lines if line.startswith("note: ")]
        assert sum("data.wrap=chat" in line for line in found) == count
        assert not any("plain text" in line for line in found[count:])


def test_too_many_rejected_rows_suggest_no_command(conversations):
    strict = replace(conversations, data=replace(conversations.data, max_bad_frac=0.2))
    checked = check_data(strict, progress=Silent())
    assert not any("precompute-ref" in str(line) for line in checked.lines())
    with refuses(BadDataError, "2 of 9", "--max-bad-frac"):
        checked.dropped.require_few()


def test_without_a_model_the_shape_and_the_balance_are_told(conversations):
    bare = replace(conversations, model=replace(conversations.model, path=""))
    checked = check_data(bare, progress=Silent())
    assert checked.roles == {Role.CHOSEN: 8, Role.REJECTED: 8}
    assert (checked.usable - len(checked.seen), len(checked.prompts)) == (1, 7)
    text = "\n".join(map(str, checked.lines()))
    assert "paired rows: prompt, chosen, rejected" in text
    assert "tokens" not in text


def test_check_counts_ties_and_takes_a_split(conversations, tmp_path):
    rows = [
        {"prompt": f"{n}?", "response_1": "a", "response_2": "b", "preference_strength": n % 2}
        for n in range(6)
    ]
    for split, some in (("train", rows), ("test", rows[:1])):
        write_rows(tmp_path / f"{split}.jsonl", some)
    data = DataOptions(files=[str(tmp_path)], split="train")
    bare = replace(conversations, model=replace(conversations.model, path=""), data=data)
    checked = check_data(bare, progress=Silent())
    text = "\n".join(map(str, checked.lines()))
    assert (checked.rows_in, checked.usable, checked.rejected) == (6, 3, [])
    assert "3 ties" in text
    assert "dropped" not in text
    assert "response_1 and response_2 -> chosen or rejected" in text


def test_one_row_of_a_thousand_may_be_unusable_by_default_and_two_may_not(config, tmp_path):
    for unusable in (1, 2):
        rows = [
            {"prompt": f"{row}?", "chosen": "a" if row >= unusable else None, "rejected": "b"}
            for row in range(1000)
        ]
        data = DataOptions(files=[write_rows(tmp_path / f"{unusable}.jsonl", rows)])
        bare = replace(config, model=replace(config.model, path=""), data=data)
        checked = check_data(bare, progress=Silent())
        assert (checked.rows_in, checked.usable) == (1000, 1000 - unusable)
        assert checked.dropped.exceed_limit == (unusable == 2)


def test_data_that_stage_one_would_refuse_are_refused(conversations, tmp_path):
    for name in ("data-train.jsonl", "data-test.jsonl"):
        write_rows(tmp_path / name, ROWS)
    files = [str(tmp_path / f"data-{split}.jsonl") for split in ("train", "test")]
    with refuses(UsageError, "split"):
        check_data(replace(conversations, data=DataOptions(files=files)), progress=Silent())
