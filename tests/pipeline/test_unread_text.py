"""Stage 1 says what it does not read, and counts preferences that contradict each other."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from align.pipeline.score_rewards import ROWS, rewards_from_labels
from align.schemas.config import DataOptions, RewardOptions
from align.schemas.errors import UsageError
from align.stages.report.export_trl import export_trl
from align.stages.storage.cache_folder import CacheFolder
from support.read_rows import write_rows
from support.stage_one import run


@pytest.fixture
def config_over(config, tmp_path):
    """The config over rows, in a JSON file of their own."""

    def write(*rows, **columns):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        rewards = RewardOptions(output=str(tmp_path / "scored"))
        return replace(config, data=DataOptions(files=[path], map=columns), rewards=rewards)

    return write


def pair(number, **more):
    return {"prompt": f"Why {number}?", "chosen": " so", "rejected": " no", **more}


def notes_of(made):
    return [line for line in made.text().splitlines() if line.startswith("note: ")]


def test_columns_of_no_text_are_one_note_and_no_part_of_the_cache(config_over):
    rows = [pair(n, id=f"a{n}", turn=n, Reward=n) for n in range(300)]
    rows.append(pair(300, late=1, input="What is this all about?"))
    made = run(config_over(*rows, input=""))
    (note,) = (line for line in notes_of(made) if "'id'" in line)
    assert "'turn'" in note
    assert "'Reward'" not in note  # which is counted, as it looks like a score
    for name in ("'id'", "'turn'", "late", "input"):
        assert not [noted for noted in made.manifest.notes if name in noted]
    assert note in notes_of(run(config_over(*rows, input="")))
    left_out = run(config_over(*rows, input="", id="", turn=""))
    assert left_out.manifest.root == made.manifest.root


def test_pairs_that_contradict_are_counted(config_over):
    rows = [pair(n, score_chosen=n, score_rejected=2.5) for n in range(6)]
    turned = pair(0, chosen=" no", rejected=" so", score_chosen=3, score_rejected=1)
    made = run(config_over(*rows, turned))
    assert made.manifest.notes["pairs_whose_rejected_score_is_higher"] == 3
    assert made.manifest.notes["pairs_in_both_orders"] == 1
    assert "note: 1 pair in both orders" in notes_of(made)


@pytest.mark.parametrize("shape", ["paired", "unpaired", "scored"])
def test_an_exported_cache_is_data_that_is_read_without_a_word(config, data, tmp_path, shape):
    made = run(replace(config, data=DataOptions(files=[str(getattr(data, shape))])))
    flat = tmp_path / "flat.parquet"

    def decode(lists, *, continues):
        return [f" the words of {len(ids)} and {number}" for number, ids in enumerate(lists)]

    export_trl(CacheFolder(made.folder), flat, decode=decode)
    assert any(name.startswith("KL_") for name in pl.read_parquet_schema(flat))
    cache = replace(config.cache, output=str(tmp_path / "again"))
    again = run(replace(config, data=DataOptions(files=[str(flat)]), cache=cache))
    assert not [note for note in notes_of(again) if "not read" in note]


def test_text_that_begins_late_is_refused_before_labels_are_scored(config_over):
    rows = [pair(n, id=n) for n in range(2000)]
    config = config_over(*rows, pair(2000, input="What is this about?"))
    with pytest.raises(UsageError, match="row 2,000 .*\n.*--map input="):
        rewards_from_labels(config)
    assert not (Path(config.rewards.output) / ROWS).exists()
