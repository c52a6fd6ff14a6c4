"""Samples are judged once: by a language model in both orders, or by a check."""

import json

import polars as pl
import pytest

from align.pipeline.parts import Part
from align.pipeline.tables.judge import calibrate, judge
from align.pipeline.tables.language_judge import judge_sampler
from align.schemas.config import Config, ModelOptions, TrackingOptions
from align.schemas.errors import LockedError, UsageError
from align.schemas.round_options import JudgeOptions
from align.stages.judge.win_rate import win_rate
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.tables import TableFolder, read_table
from align.stages.tracking.progress import Progress
from support.command import align, success
from support.refusals import refuses
from support.sample_tables import sample_table
from support.stage_one import contents
from support.stub_judge import StubJudge

TEXTS = {"Name a number.": ["7", "3", "9"], "Another?": ["2", "2", "5"]}


def config_of(output, options):
    return Config(
        judge=JudgeOptions(output=str(output), **options), tracking=TrackingOptions(mlflow=False)
    )


@pytest.fixture
def judged(tmp_path):
    """Judges samples, and returns the result and the rows."""

    def run(samples, sampler=None, *, output=tmp_path / "judged", part=None, **options):
        config = config_of(output, options)
        result = judge(config, samples, progress=Progress(), part=part, sampler=sampler)
        if result.manifest is None:
            return result, []
        return result, read_table(TableFolder.at(str(output), "judged"))[1].rows(named=True)

    return run


@pytest.fixture
def samples(tmp_path):
    return sample_table(tmp_path / "s", TEXTS)


def column(rows, name):
    return [row[name] for row in rows]


def test_a_rubric_asks_for_each_different_sample_once_also_in_a_store(samples, judged, bucket):
    stub = StubJudge()
    for new in (5, 0):
        result, rows = judged(samples, stub, output=f"{bucket}/judged", by="rubric")
        assert column(rows, "score") == [7.0, 3.0, 9.0, 2.0, 2.0, 5.0]
        assert (result.counts.new, len(stub.asked)) == (new, 5)  # "2" stands twice
    assert result.manifest.counts["judgments"] == 5
    assert result.manifest.counts["judge_completion_tokens"] == 10


def test_pairs_are_compared_in_both_orders_and_equal_texts_are_not(samples, judged):
    stub = StubJudge()
    result, rows = judged(samples, stub, by="pairwise")
    # 7 beats 3, 9 beats both; of 2, 2 and 5: 5 beats both, and the others tie.
    assert column(rows, "wins") == [1, 0, 2, 0, 0, 2]
    assert column(rows, "ties") == [0, 0, 0, 1, 1, 0]
    assert column(rows, "losses") == [1, 2, 0, 1, 1, 0]
    assert column(rows, "score") == [0.5, 0.0, 1.0, 0.25, 0.25, 1.0]
    assert len(stub.asked) == 3 * 2 + 1 * 2  # the second prompt: 2 and 5, in both orders
    counts = result.manifest.counts
    assert (counts["comparisons"], counts["comparisons_of_equal_texts"]) == (6, 1)
    with_the_first, rows = judged(samples, stub, by="pairwise", pairs="first")
    assert with_the_first.counts.new == 0
    assert column(rows, "score") == [0.5, 0.0, 1.0, 0.25, 0.5, 1.0]


def test_samples_of_another_folder_are_compared_by_prompt_and_number(tmp_path, samples, judged):
    theirs = sample_table(tmp_path / "theirs", {"Another?": ["1", "2"], "Name a number.": ["8"]})
    _, rows = judged(samples, StubJudge(), by="pairwise", against=theirs)
    assert column(rows, "score") == [0.0, None, None, 1.0, 0.5, None]
    found = win_rate(pl.DataFrame(rows))
    assert (found.rate, found.ties, found.n, found.unjudged) == (0.5, 1 / 3, 3, 3)


def test_no_judgment_is_bought_twice(tmp_path, samples, judged):
    stub = StubJudge()
    first, rows = judged(samples, stub, by="pairwise")
    asked = len(stub.asked)
    again, _ = judged(samples, stub, by="pairwise")
    assert (again.manifest, again.counts.new, again.counts.known) == (first.manifest, 0, asked)
    (tmp_path / "judged" / "judged.parquet").write_bytes(b"nothing")
    again, same = judged(samples, stub, by="pairwise")
    assert (again.manifest, same, len(stub.asked)) == (first.manifest, rows, asked)
    grown = {"Another?": ["2", "2", "5", "6"], "Name a number.": ["7", "3", "9"]}
    result, more = judged(sample_table(tmp_path / "grown", grown), stub, by="pairwise")
    assert result.counts.new == len(stub.asked) - asked == 2 * 2  # 6 with 2 and with 5
    assert column(more, "score")[-3:] == column(rows, "score")[:3]


def test_another_judge_is_asked_anew(here, samples, judged):
    (here / "own.j2").write_text("{{ messages[0].content }}\n[x answer]\n{{ answer }}\n[x end]")
    judged(samples, StubJudge(), by="rubric")
    for name, change in (
        ("stub", {"max_new_tokens": 99}),
        ("stub", {"template": "own.j2"}),
        ("stub", {"by": "pairwise"}),
        ("another", {}),
    ):
        stub = StubJudge(name=name)
        result, _ = judged(samples, stub, **{"by": "rubric", **change})
        assert (result.counts.known, result.counts.new) == (0, len(stub.asked))
        assert result.counts.new >= 5


def test_what_was_received_before_a_crash_is_not_asked_again(tmp_path, samples, judged):
    dies, goes_on = StubJudge(stops_after=3), StubJudge()
    with pytest.raises(KeyboardInterrupt):
        judged(samples, dies, by="pairwise")
    result, rows = judged(samples, goes_on, by="pairwise")
    assert (result.counts.known, result.counts.new) == (3, 5)
    assert not {one.key for one in dies.asked} & {one.key for one in goes_on.asked}
    assert judged(samples, StubJudge(), by="pairwise", output=tmp_path / "other")[1] == rows


def test_an_answer_without_a_verdict_is_counted_and_never_guessed(samples, judged):
    stub = StubJudge(says={"]\n7\n[": "I like 7 of 10", "]\n5\n[": "Score: 3\nScore: 5"})
    result, rows = judged(samples, stub, by="rubric")
    assert column(rows, "score") == [None, 3.0, 9.0, 2.0, 2.0, None]
    counts = result.manifest.counts
    assert (counts["refusals"], counts["judged"], counts["unjudged"]) == (2, 4, 2)
    assert judged(samples, stub, by="rubric")[0].counts.new == 0  # a refusal was paid for too
    # A refused comparison counts for nobody.
    result, rows = judged(samples, StubJudge(says={"]\n9\n[": "Both are good."}), by="pairwise")
    assert column(rows, "score")[:3] == [1.0, 0.0, None]
    assert result.manifest.counts["comparisons_refused"] == 2


@pytest.mark.parametrize(("by", "order"), [("rubric", (1, 2)), ("pairwise", (2, 1))])
def test_parts_make_what_one_process_makes(tmp_path, judged, order, by):
    texts = {f"Q{at}": ["7", "3 " + "x" * 9000 * (at < 2)] for at in range(6)}
    samples = sample_table(tmp_path / "s", texts)
    whole, rows = judged(samples, StubJudge(longest=5000), by=by, output=tmp_path / "whole")
    untaken = whole.manifest.counts["questions_not_taken"]
    assert untaken == (2 if by == "rubric" else 4)
    stubs = [StubJudge(longest=5000) for _ in order]
    made = [
        judged(samples, stub, by=by, part=Part(number, 2))
        for stub, number in zip(stubs, order, strict=True)
    ]
    assert [result.manifest for result, _ in made] == [None, whole.manifest]
    assert made[1][1] == rows
    keys = [{one.key for one in stub.asked} for stub in stubs]
    assert all(keys)
    assert not keys[0] & keys[1]
    willing, _ = judged(samples, StubJudge(), by=by)  # its context has grown
    assert willing.counts.new == untaken
    assert willing.manifest.counts["questions_not_taken"] == 0


def numbers(count):
    """Gold pairs whose chosen answer is the larger number."""
    return [
        {"prompt": f"Number {index}?", "chosen": str(index + 2), "rejected": str(index + 1)}
        for index in range(count)
    ]


def measured(tmp_path, stub, by, rows):
    """The figures of a judge on gold rows."""
    (tmp_path / "gold.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config, gold = config_of(tmp_path / "calibrated", {"by": by}), str(tmp_path / "gold.jsonl")
    found = calibrate(config, gold, progress=Progress(), sampler=stub)
    return {name: (share.count, share.total) for name, share in found.shares.items()}


def test_calibrate_shows_a_planted_position_bias_and_keeps_its_judgments(tmp_path):
    """A judge prefers the first answer in 30 of 100 questions, and is right in the others.

    Its verdict flips where it is biased in the order that shows the worse answer first.
    """
    stub = StubJudge(bias=0.3)
    for _ in range(2):
        cells = measured(tmp_path, stub, "pairwise", numbers(400))
        assert len(stub.asked) == 800
    rates = {name: count / of for name, (count, of) in cells.items()}
    assert rates["first answer preferred"] == pytest.approx((1 + 0.3) / 2, abs=0.04)
    assert rates["verdict flips with the order"] == pytest.approx(0.3, abs=0.07)
    assert rates["gold one shown first: preferred"] == 1.0
    assert rates["gold one shown second: preferred"] == pytest.approx(0.7, abs=0.07)
    assert rates["agrees with gold, where it decides"] == 1.0  # both orders remove it
    assert rates["ties"] == rates["verdict flips with the order"]


SCORED = [
    {"prompt": "A?", "completions": ["1", "9", "5"], "scores": [0.1, 0.9, 0.5]},
    {"prompt": "B?", "completions": ["1", "2"], "scores": [0.5, 0.5]},  # equal: no gold pair
]


@pytest.mark.parametrize(
    ("by", "rows", "agrees", "ties"),
    [
        # A rubric gives 1 to 10: the first nine pairs differ, and from 10 on all are 10.
        ("rubric", numbers(40), (9, 9), (31, 40)),
        ("rubric", SCORED, (1, 1), (0, 1)),
        ("pairwise", SCORED, (1, 1), (0, 1)),
    ],
)
def test_a_judge_is_calibrated_on_pairs_and_scored_data(tmp_path, by, rows, agrees, ties):
    found = measured(tmp_path, StubJudge(), by, rows)
    assert (found["agrees with gold, where it decides"], found["ties"]) == (agrees, ties)
    assert found["not judged"] == (0, ties[1])


def test_what_cannot_be_judged_is_refused(tmp_path, judged, samples):
    scored = sample_table(tmp_path / "scored", TEXTS, score=[1, 2])
    alone, other = (sample_table(tmp_path / prompt, {prompt: ["1"]}) for prompt in ("Q", "R"))
    for table, options, name in (
        (scored, {"by": "rubric"}, "'score'"),
        (alone, {"by": "pairwise"}, "--against"),
        (alone, {"by": "pairwise", "against": other}, other),
    ):
        with refuses(UsageError, name):
            judged(table, StubJudge(), **options)
    folder = TableFolder.at(str(tmp_path / "judged"), "judged")
    folder.prepare()
    with owner_lock(folder.root, "another"), refuses(LockedError, folder.root):
        judged(samples, StubJudge(), by="rubric")


def test_a_local_model_that_answers_nonsense_gives_no_score(world, tmp_path, judged):
    samples = sample_table(tmp_path / "s", {"Say yes.": ["Yes.", "No."]})
    words = ("judge", samples, "--by", "rubric", "--model", world.model, "--no-mlflow")
    words += ("--output", tmp_path / "out", "--set", "judge.max_new_tokens=8")
    success(*words)
    assert TableFolder.at(str(tmp_path / "out"), "judged").find().counts["refusals"] == 2
    before = contents(tmp_path / "out")
    success(*words)
    assert contents(tmp_path / "out") == before
    # An adapter that the settings name is the policy's.
    config = Config(ModelOptions(adapter="own"), judge=JudgeOptions(model=str(world.model)))
    assert judge_sampler(config).model == ModelOptions(path=str(world.model))


def test_of_ranks_one_publishes_a_table(tmp_path, monkeypatch):
    samples = sample_table(tmp_path / "s", TEXTS, answer=["7", "2"])
    words = ("judge", samples, "--by", "exact", "--output", tmp_path / "out", "--no-mlflow")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert align(*words).out
    assert align(*words).out == ""
    monkeypatch.setenv("RANK", "0")
    assert align(*words).out
