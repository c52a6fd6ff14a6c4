"""What rounds ask of each verb, and how they measure, without a model."""

import polars as pl
import pytest

from align.pipeline.options.settings import load_settings
from align.pipeline.rounds.round_prompts import PromptSplit, write_prompts
from align.pipeline.rounds.rounds_checks import open_rounds
from align.pipeline.rounds.rounds_evaluation import answering, repeated_share, stop_reason
from align.schemas.errors import UsageError
from align.schemas.round_options import RoundsOptions
from align.schemas.round_record import Answering, HeldOut, RoundRecord, Versus
from align.schemas.samples import Prompt
from support.refusals import refuses
from support.rooms import ROOT
from support.rounds_play import prompts_in, write_settings


def test_answers_are_measured_by_hand():
    # a b c d a b c d: 5 4-grams, of which the last, a b c d, is the first again.
    assert repeated_share(["a b c d a b c d"]) == pytest.approx(1 / 5)
    # 6 of the same word: 3 4-grams, 2 of them known. Together with the 5 above: 3 of 8.
    assert repeated_share(["x x x x x x", "a b c d a b c d"]) == pytest.approx(3 / 8)
    assert repeated_share(["a b c d", "a b c d"]) == 0  # another text may say the same
    columns = {"completion_tokens": [2, 6], "finish": ["stop", "length"], "score": [1.0, None]}
    table = pl.DataFrame({"completion": ["one two", "x x x x x"], **columns})
    measured = {"mean_score": 1.0, "mean_tokens": 4.0, "repeated": 0.5, "cut": 0.5}
    assert answering(table) == Answering(samples=2, **measured)


def finished(*, rate=0.5, tokens=10.0, first=10.0):
    one = Answering(4, 0.5, tokens, 0.0, 0.0)
    versus = Versus(rate, rate - 0.1, rate + 0.1, 0.25, 4, 0)
    held_out = HeldOut(Answering(4, 0.25, first, 0.0, 0.0), one, versus, versus)
    return RoundRecord(1, 2, {}, {}, {}, {}, {"loss": 0.5}, held_out)


@pytest.mark.parametrize(
    ("measured", "options", "stops"),
    [
        ({"rate": 0.45}, {"min_win_rate": 0.5}, True),
        ({"rate": 0.5}, {"min_win_rate": 0.5}, False),
        ({"tokens": 16.0}, {"max_length_growth": 1.5}, True),
        ({"tokens": 15.0}, {"max_length_growth": 1.5}, False),
        ({"tokens": 5.4, "first": 4.5}, {"max_length_growth": 1.2}, False),  # 1.2000000000000002
        ({"rate": 0.0, "tokens": 1000.0}, {}, False),
    ],
)
def test_rounds_stop_at_the_bounds_and_at_nothing_else(measured, options, stops):
    assert bool(stop_reason(finished(**measured), RoundsOptions(**options))) == stops


def split(count, seed=0):
    return PromptSplit(tuple(Prompt(f"p{place}") for place in range(count)), (), seed)


def test_slices_follow_from_content_and_seed_and_are_fresh_until_all_prompts_were_used():
    made = split(10)
    rounds = [[prompt.text for prompt in made.of_round(number, 4)] for number in (1, 2, 3)]
    drawn = [text for one in rounds for text in one]
    assert len(set(drawn[:10])) == 10
    assert drawn[10:] == drawn[:2]  # after the last the first comes again
    assert len(made.of_round(1, 0)) == len(made.of_round(7, 99)) == 10
    backward = PromptSplit(made.train[::-1], (), 0)
    assert made.of_round(2, 4) == backward.of_round(2, 4) != split(10, seed=1).of_round(2, 4)


def test_prompts_of_other_data_replace_those_that_an_interrupted_round_left(tmp_path):
    for text in ("old", "new"):
        write_prompts(tmp_path / "prompts.parquet", [Prompt(text)])
        assert prompts_in(tmp_path / "prompts.parquet") == {text}


def opened(folder, world, **changes):
    return open_rounds(load_settings({}, [], file=write_settings(folder, world, **changes)))


def test_the_example_is_taken_over_a_tiny_world_and_nothing_is_made_yet(world, tmp_path):
    (tmp_path / "world").symlink_to(world.folder)
    path = tmp_path / "rounds.yaml"
    path.write_text((ROOT / "examples" / "rounds.yaml").read_text())
    job = open_rounds(load_settings({}, [], file=path, command="rounds"))
    assert len(job.prompts(3)) == min(300, len(job.split.train)) > 0
    assert not (tmp_path / "align-rounds").exists()


@pytest.mark.parametrize("reference", ["fixed", "previous"])
def test_each_verb_gets_the_policy_and_the_reference_of_its_round(world, tmp_path, reference):
    lora = opened(tmp_path, world, lora={"enabled": True})
    assert lora.policy(1).path == str(lora.folder.round(1).run.merged)
    assert lora.training(lora.folder.round(1)).config.lora.merge
    job = opened(tmp_path, world, rounds={"reference": reference})
    one, before = job.folder.round(2), job.folder.round(1)
    trained = str(before.run.model)
    assert job.sampling(job.policy(1), one.prompts, one.samples).model.path == trained
    scoring, training = job.scoring(one), job.training(one).config
    is_fixed = reference == "fixed"
    assert scoring.model.path == (str(world.model) if is_fixed else trained)
    assert (str(before.cache) in scoring.cache.reuse) == is_fixed
    assert training.model.path == scoring.model.path
    assert training.train.model == (trained if is_fixed else "")
    assert training.train.other_reference == is_fixed
    assert training.train.resume == "auto"
    first = job.training(job.folder.round(1)).config.train
    assert (first.model, first.other_reference) == ("", False)


def test_a_judge_has_a_chat_template_and_a_server_of_its_own(world, tmp_path):
    template = str(tmp_path / "own.jinja")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    served = {"judge": {"by": "rubric"}, "server": {**SERVED, "revision": "1"}}
    job = opened(tmp_path, world, tokens={"chat_template": template}, **served)
    one = job.folder.round(1)
    sampling, judging = job.sampling(job.first, one.prompts, one.samples), job.judging(one.judged)
    assert sampling.tokens.chat_template == job.scoring(one).tokens.chat_template == template
    assert judging.tokens.chat_template == ""
    assert (sampling.server.url, judging.server.url) == ("", SERVED["url"])


def test_a_round_is_made_from_the_template_of_its_judge(world, tmp_path):
    template, made = tmp_path / "own.j2", []
    judge = {"by": "rubric", "template": str(template)}
    for text in ("{{ messages }}{{ answer }}", "{{ messages }}: {{ answer }}"):
        template.write_text(text)
        job = opened(tmp_path, world, judge=judge, server={**SERVED, "revision": "1"})
        made.append(job.made_from(1, None))
    assert made[0] != made[1]


GRPO = {"train": {"method": "grpo"}, "cache": {"kl_pairs": 0, "token_logps": True}}
SERVED = {"url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"judge": {"by": "rubric", "template": "rounds.yaml"}}, ("rounds.yaml", "answer")),
        ({"judge": {"by": "reward"}}, ("--reward-model",)),
        ({"judge": {"against": "elsewhere"}}, ("judge.against",)),
        ({"train": {"method": "reward"}}, ("reward",)),
        ({"train": {"method": "kto"}}, ("kto", "cache.kl_pairs")),
        ({"train": {"eval_fraction": 0.1}}, ("train.eval_fraction",)),
        ({"train": {"eval_cache": "elsewhere"}}, ("train.eval_cache",)),
        ({"select": {"rows": "labels"}}, ("select.rows", "pairs")),
        ({**GRPO, "sample": {"temperature": 0.7}}, ("temperature 0.7", "train.other_sampling")),
        ({"rounds": {"eval_n": 2}}, ("rounds.eval_n",)),
        ({"rounds": {"eval_fraction": 0.0, "min_win_rate": 0.5}}, ("rounds.eval_fraction",)),
        ({"rounds": {"output": "s3://bucket/rounds"}}, ("s3://bucket/rounds",)),
        ({"server": {"url": "http://127.0.0.1:1/v1"}}, ("server.url",)),
        ({"lora": {"enabled": True}, "model": {"adapter": "a"}}, ("model.adapter",)),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(world, tmp_path, changes, names):
    path = write_settings(tmp_path, world, **changes)
    with refuses(UsageError, *names):
        open_rounds(load_settings({}, [], file=path))


def test_rounds_of_grpo_sample_as_the_policy_is_unless_another_way_is_meant(
    world, tmp_path, monkeypatch
):
    assert opened(tmp_path, world, **GRPO).recipe.name == "grpo"
    meant = {"method": "grpo", "other_sampling": True}
    job = opened(tmp_path, world, **GRPO | {"train": meant, "sample": {"temperature": 0.7}})
    assert job.training(job.folder.round(1)).config.train.other_sampling
    assert opened(tmp_path, world, sample={"temperature": 0.7}).recipe.name == "dpo"
    monkeypatch.setenv("WORLD_SIZE", "2")  # by a launcher
    with refuses(UsageError, "one process"):
        opened(tmp_path, world)
