"""Samples are judged once: by a language model in both orders, a reward model, or a check."""

import json
import pickle

import polars as pl
import pytest

from align.pipeline.executor import Share
from align.pipeline.judge import calibrate, judge
from align.pipeline.language_judge import JudgeTasks, with_template
from align.schemas.config import Config, TrackingOptions
from align.schemas.errors import LockedError, UsageError
from align.schemas.round_options import JudgeOptions
from align.stages.judge.judgments import Asked
from align.stages.judge.win_rate import win_rate
from align.stages.storage.locks import owner_lock
from align.stages.storage.tables import TableFolder, read_table
from align.stages.tracking.progress import NoProgress
from support.command import refusal
from support.sample_tables import sample_table
from support.stub_judge import StubJudge

TEXTS = {"Name a number.": ["7", "3", "9"], "Another?": ["2", "2", "5"]}


@pytest.fixture
def judged(tmp_path):
    """Judges samples, and returns the result and the rows."""

    def run(samples, sampler=None, *, output="judged", share=None, **options):
        asked = JudgeOptions(output=str(tmp_path / output), **options)
        config = Config(judge=asked, tracking=TrackingOptions(mlflow=False))
        result = judge(config, samples, progress=NoProgress(), share=share, sampler=sampler)
        if result.manifest is None:
            return result, []
        _, table = read_table(TableFolder.at(str(tmp_path / output), "judged"))
        return result, table.rows(named=True)

    return run


def column(rows, name):
    return [row[name] for row in rows]


def test_a_rubric_asks_for_each_different_sample_once(tmp_path, judged):
    stub = StubJudge()
    result, rows = judged(sample_table(tmp_path / "s", TEXTS), stub, by="rubric")
    assert column(rows, "score") == [7.0, 3.0, 9.0, 2.0, 2.0, 5.0]
    assert len(stub.asked) == result.new == 5  # "2" stands twice
    assert result.manifest.counts["judgments"] == 5
    assert result.manifest.counts["judge_completion_tokens"] == 10
    assert "next: align select" in result.text()


def test_pairs_are_compared_in_both_orders_and_equal_texts_are_not(tmp_path, judged):
    stub = StubJudge()
    result, rows = judged(sample_table(tmp_path / "s", TEXTS), stub, by="pairwise")
    # 7 beats 3, 9 beats both; of 2, 2 and 5: 5 beats both, and the others tie.
    assert column(rows, "wins") == [1, 0, 2, 0, 0, 2]
    assert column(rows, "ties") == [0, 0, 0, 1, 1, 0]
    assert column(rows, "losses") == [1, 2, 0, 1, 1, 0]
    assert column(rows, "score") == [0.5, 0.0, 1.0, 0.25, 0.25, 1.0]
    assert len(stub.asked) == 3 * 2 + 1 * 2  # the second prompt: 2 and 5, in both orders
    counts = result.manifest.counts
    assert (counts["comparisons"], counts["comparisons_of_equal_texts"]) == (6, 1)


def test_pairs_with_the_first_alone(tmp_path, judged):
    stub = StubJudge()
    samples = sample_table(tmp_path / "s", TEXTS)
    _, rows = judged(samples, stub, by="pairwise", pairs="first")
    assert column(rows, "score") == [0.5, 0.0, 1.0, 0.25, 0.5, 1.0]
    assert len(stub.asked) == 2 * 2 + 1 * 2


def test_samples_of_another_folder_are_compared_by_prompt_and_number(tmp_path, judged):
    ours = sample_table(tmp_path / "ours", TEXTS)
    theirs = sample_table(tmp_path / "theirs", {"Another?": ["1", "2"], "Name a number.": ["8"]})
    _, rows = judged(ours, StubJudge(), by="pairwise", against=theirs)
    assert column(rows, "score") == [0.0, None, None, 1.0, 0.5, None]
    found = win_rate(pl.DataFrame(rows))
    assert (found.rate, found.ties, found.n, found.unjudged) == (0.5, 1 / 3, 3, 3)


def test_no_judgment_is_bought_twice(tmp_path, judged):
    stub = StubJudge()
    samples = sample_table(tmp_path / "s", TEXTS)
    first, rows = judged(samples, stub, by="pairwise")
    asked = len(stub.asked)
    again, _ = judged(samples, stub, by="pairwise")
    assert len(stub.asked) == asked
    assert again.manifest == first.manifest
    assert (again.new, again.known) == (0, asked)
    grown = {"Another?": ["2", "2", "5", "6"], "Name a number.": ["7", "3", "9"]}
    result, more = judged(sample_table(tmp_path / "grown", grown), stub, by="pairwise")
    assert result.new == len(stub.asked) - asked == 2 * 2  # 6 with 2 and with 5
    assert column(more, "score")[-3:] == column(rows, "score")[:3]


@pytest.mark.parametrize(
    ("change", "stub"),
    [
        ({"max_new_tokens": 99}, StubJudge()),
        ({}, StubJudge(name="another")),
        ({"template": "own.j2"}, StubJudge()),
        ({"by": "pairwise"}, StubJudge()),
    ],
)
def test_another_judge_is_asked_anew(here, judged, change, stub):
    (here / "own.j2").write_text("{{ messages[0].content }}\n[x answer]\n{{ answer }}\n[x end]")
    samples = sample_table(here / "s", TEXTS)
    judged(samples, StubJudge(), by="rubric")
    result, _ = judged(samples, stub, **{"by": "rubric", **change})
    assert (result.known, result.new) == (0, len(stub.asked))
    assert result.new >= 5


def test_what_was_received_before_a_crash_is_not_asked_again(tmp_path, judged):
    samples = sample_table(tmp_path / "s", TEXTS)
    dies = StubJudge(stops_after=3)
    with pytest.raises(KeyboardInterrupt):
        judged(samples, dies, by="pairwise")
    goes_on = StubJudge()
    result, rows = judged(samples, goes_on, by="pairwise")
    assert (result.known, result.new) == (3, 5)
    assert not {one.key for one in dies.asked} & {one.key for one in goes_on.asked}
    _, undisturbed = judged(samples, StubJudge(), by="pairwise", output="other")
    assert rows == undisturbed


def test_an_answer_without_a_verdict_is_counted_and_never_guessed(tmp_path, judged):
    says = {"]\n7\n[": "I like 7 of 10", "]\n5\n[": "Score: 3\nScore: 5"}
    stub = StubJudge(says=says)
    samples = sample_table(tmp_path / "s", TEXTS)
    result, rows = judged(samples, stub, by="rubric")
    assert column(rows, "score") == [None, 3.0, 9.0, 2.0, 2.0, None]
    counts = result.manifest.counts
    assert (counts["refusals"], counts["judged"], counts["unjudged"]) == (2, 4, 2)
    asked = len(stub.asked)
    judged(samples, stub, by="rubric")
    assert len(stub.asked) == asked  # a refusal was paid for too


def test_a_refused_comparison_counts_for_nobody(tmp_path, judged):
    stub = StubJudge(says={"]\n9\n[": "Both are good."})
    result, rows = judged(sample_table(tmp_path / "s", TEXTS), stub, by="pairwise")
    assert column(rows, "score")[:3] == [1.0, 0.0, None]
    assert result.manifest.counts["comparisons_refused"] == 2
    assert "2 refused" in result.text()


def test_a_question_that_the_judge_cannot_take_is_counted_and_asked_again(tmp_path, judged):
    samples = sample_table(tmp_path / "s", {"Q": ["7", "3 " + "x" * 9000]})
    result, rows = judged(samples, StubJudge(longest=5000), by="rubric")
    assert column(rows, "score") == [7.0, None]
    assert result.manifest.counts["questions_not_taken"] == 1
    assert "1 question that the judge cannot take" in result.text()
    result, rows = judged(samples, StubJudge(), by="rubric")  # its context has grown
    assert column(rows, "score") == [7.0, 3.0]
    assert (result.new, result.known) == (1, 1)


def test_parts_make_what_one_process_makes(tmp_path, judged):
    samples = sample_table(tmp_path / "s", TEXTS)
    whole, rows = judged(samples, StubJudge(), by="pairwise", output="whole")
    first, second = StubJudge(), StubJudge()
    early, _ = judged(samples, first, by="pairwise", share=Share(1, 2))
    late, parted = judged(samples, second, by="pairwise", share=Share(2, 2))
    assert early.manifest is None
    assert "part 1/2" in early.text()
    assert late.manifest == whole.manifest
    assert parted == rows
    assert len(first.asked) + len(second.asked) == 8
    assert first.asked
    assert second.asked


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("by", ["rubric", "pairwise"])
def test_parts_tell_each_other_what_the_judge_cannot_take(tmp_path, judged, order, by):
    texts = {f"Q{at}": ["7", "3 " + "x" * 9000 * (at < 2)] for at in range(6)}
    samples = sample_table(tmp_path / "s", texts)
    whole, rows = judged(samples, StubJudge(longest=5000), by=by, output="whole")
    assert whole.manifest.counts["questions_not_taken"] == (2 if by == "rubric" else 4)
    made = [
        judged(samples, StubJudge(longest=5000), by=by, share=Share(number, 2)) for number in order
    ]
    assert [result.manifest for result, _ in made] == [None, whole.manifest]
    assert made[1][1] == rows
    willing, _ = judged(samples, StubJudge(), by=by)  # its context has grown
    assert willing.new == whole.manifest.counts["questions_not_taken"]
    assert willing.manifest.counts["questions_not_taken"] == 0


def test_a_biased_judge_gives_no_win_to_what_stands_first(tmp_path, judged):
    """Both sides are alike. Asked in one order, a judge that prefers the first finds a winner."""
    alike = {f"Number {index}?": ["5"] for index in range(60)}
    other = {prompt: ["5.0"] for prompt in alike}
    ours, theirs = sample_table(tmp_path / "a", alike), sample_table(tmp_path / "b", other)
    _, rows = judged(ours, StubJudge(bias=1.0), by="pairwise", against=theirs)
    assert set(column(rows, "score")) == {0.5}  # one order would say 1.0


@pytest.fixture
def gold(tmp_path):
    """400 pairs whose chosen answer is the larger number."""
    rows = [
        {"prompt": f"Number {index}?", "chosen": str(index + 2), "rejected": str(index + 1)}
        for index in range(400)
    ]
    path = tmp_path / "gold.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def measured(tmp_path, gold, stub, **options):
    asked = JudgeOptions(output=str(tmp_path / "calibrated"), **options)
    config = Config(judge=asked, tracking=TrackingOptions(mlflow=False))
    return calibrate(config, gold, progress=NoProgress(), sampler=stub)


def test_calibrate_shows_a_planted_position_bias(tmp_path, gold):
    """A judge prefers the first answer in 30 of 100 questions, and is right in the others.

    Its verdict flips where it is biased in the order that shows the worse answer first.
    """
    stub = StubJudge(bias=0.3)
    found = measured(tmp_path, gold, stub, by="pairwise")
    rates = {name: share.count / share.of for name, share in found.shares.items() if share.of}
    assert len(stub.asked) == 800
    assert rates["first answer preferred"] == pytest.approx((1 + 0.3) / 2, abs=0.04)
    assert rates["verdict flips with the order"] == pytest.approx(0.3, abs=0.07)
    assert rates["gold one shown first: preferred"] == 1.0
    assert rates["gold one shown second: preferred"] == pytest.approx(0.7, abs=0.07)
    assert rates["agrees with gold, where it decides"] == 1.0  # both orders remove it
    assert rates["ties"] == rates["verdict flips with the order"]
    assert "800 questions" in found.text()


def test_an_unbiased_judge_shows_none(tmp_path, gold):
    found = measured(tmp_path, gold, StubJudge(), by="pairwise")
    cells = {name: (share.count, share.of) for name, share in found.shares.items()}
    assert cells["first answer preferred"] == (400, 800)
    assert cells["verdict flips with the order"] == (0, 400)
    assert cells["agrees with gold, where it decides"] == (400, 400)
    assert cells["not judged"] == (0, 400)


def test_calibrate_keeps_its_judgments(tmp_path, gold):
    stub = StubJudge()
    measured(tmp_path, gold, stub, by="pairwise")
    assert measured(tmp_path, gold, stub, by="pairwise").shares
    assert len(stub.asked) == 800


def test_a_rubric_is_calibrated_by_its_scores(tmp_path, gold):
    """It gives 1 to 10: the first nine pairs differ, and from 10 on all are 10."""
    found = measured(tmp_path, gold, StubJudge(), by="rubric")
    cells = {name: (share.count, share.of) for name, share in found.shares.items()}
    assert cells == {
        "agrees with gold, where it decides": (9, 9),
        "ties": (391, 400),
        "not judged": (0, 400),
    }


def test_the_best_and_the_worst_of_scored_data_are_a_gold_pair(tmp_path):
    rows = [
        {"prompt": "A?", "completions": ["1", "9", "5"], "scores": [0.1, 0.9, 0.5]},
        {"prompt": "B?", "completions": ["1", "2"], "scores": [0.5, 0.5]},
    ]
    path = tmp_path / "gold.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = measured(tmp_path, str(path), StubJudge(), by="pairwise")
    assert (found.pairs, found.left_out) == (1, 1)
    assert found.shares["agrees with gold, where it decides"].count == 1


def test_a_check_scores_samples_of_conversations(tmp_path, judged):
    samples = sample_table(tmp_path / "s", TEXTS, chat=True, answer=["9", None])
    result, rows = judged(samples, by="exact")
    assert column(rows, "score") == [0.0, 0.0, 1.0, None, None, None]
    assert result.manifest.counts == {"judged": 3, "unjudged": 3}


def test_a_column_may_hold_conversations_as_json(tmp_path, judged):
    """So are conversations that stand beside texts, or that call tools."""
    folder = sample_table(tmp_path / "chat", TEXTS, chat=True)
    whole, rows = judged(folder, StubJudge(), by="pairwise")
    table = read_table(TableFolder.at(folder, "samples"))[1]
    texts = [
        pl.Series(name, [json.dumps(value) for value in table[name].to_list()])
        for name in ("prompt", "completion")
    ]
    TableFolder.at(folder, "samples").publish(
        table.with_columns(texts), made_from={}, settings={}, counts={}
    )
    again, same = judged(folder, StubJudge(), by="pairwise")
    assert (again.new, again.known) == (0, whole.new)
    assert column(same, "score") == column(rows, "score")


def test_samples_that_have_a_score_are_refused(tmp_path, judged):
    samples = sample_table(tmp_path / "s", TEXTS, score=[1, 2])
    with pytest.raises(UsageError, match="column 'score'"):
        judged(samples, StubJudge(), by="rubric")


def test_nothing_to_compare_is_refused(tmp_path, judged):
    alone = sample_table(tmp_path / "s", {"Q": ["1"]})
    with pytest.raises(UsageError, match="no prompt has two samples"):
        judged(alone, StubJudge(), by="pairwise")
    other = sample_table(tmp_path / "t", {"R": ["1"]})
    with pytest.raises(UsageError, match="has no sample of the same"):
        judged(alone, StubJudge(), by="pairwise", against=other)
    with pytest.raises(UsageError, match="only judge.by pairwise"):
        judged(alone, StubJudge(), by="rubric", against=other)


def test_groups_of_questions_travel_to_another_process(tmp_path):
    """As they do to the actors of a Ray cluster."""
    asked = JudgeOptions(by="pairwise")
    model = with_template(Config(judge=asked), StubJudge())
    pairs = [("1", "2"), ("4", "3")]
    questions = model.judge.keyed(
        Asked("k" * 32, "Q", texts) for pair in pairs for texts in (pair, pair[::-1])
    )
    tasks = JudgeTasks(tmp_path / "answers", model, (questions,))
    there = pickle.loads(pickle.dumps(tasks))
    assert not there.is_committed(0)
    received = there.open(NoProgress())(0)
    assert (received.new, received.completion_tokens) == (4, 8)
    assert tasks.is_committed(0)
    found = model.judge.read(questions.keys(), tasks.answers)
    assert [found.verdicts[key] for key in questions] == ["B", "A", "A", "B"]


def test_one_command_at_a_time_judges_in_a_folder(tmp_path, judged):
    samples = sample_table(tmp_path / "s", TEXTS)
    folder = TableFolder.at(str(tmp_path / "judged"), "judged")
    folder.prepare()
    with owner_lock(folder, "another"), pytest.raises(LockedError, match="in use"):
        judged(samples, StubJudge(), by="rubric")


def test_judged_samples_may_be_in_a_store(tmp_path, bucket):
    samples = sample_table(tmp_path / "s", TEXTS)
    asked = JudgeOptions(output=str(bucket / "judged"), by="rubric")
    config = Config(judge=asked, tracking=TrackingOptions(mlflow=False))
    stub = StubJudge()
    for new in (5, 0):
        result = judge(config, samples, progress=NoProgress(), sampler=stub)
        assert (result.new, len(stub.asked)) == (new, 5)
    _, table = read_table(TableFolder.at(str(bucket / "judged"), "judged"))
    assert table["score"].to_list() == [7.0, 3.0, 9.0, 2.0, 2.0, 5.0]


def test_a_command_names_its_judge(tmp_path):
    samples = sample_table(tmp_path / "s", TEXTS)
    out = ("--output", tmp_path / "out", "--no-mlflow")
    assert "Name the judge by --by" in refusal(2, "judge", samples, *out)
    assert "name the language model" in refusal(2, "judge", samples, "--by", "rubric", *out)
    assert "--reward-model" in refusal(2, "judge", samples, "--by", "reward", *out)
    assert "not a finished table" in refusal(2, "judge", tmp_path, "--by", "exact", *out)
    assert "one of them" in refusal(2, "judge", "--by", "exact", *out)
    both = ("judge", samples, "--calibrate", "gold.jsonl", "--by", "exact", *out)
    assert "one of them" in refusal(2, *both)


def test_a_damaged_table_is_made_again(tmp_path, judged):
    samples = sample_table(tmp_path / "s", TEXTS)
    stub = StubJudge()
    first, rows = judged(samples, stub, by="rubric")
    (tmp_path / "judged" / "judged.parquet").write_bytes(b"nothing")
    again, same = judged(samples, stub, by="rubric")
    assert (again.manifest, same, len(stub.asked)) == (first.manifest, rows, 5)
