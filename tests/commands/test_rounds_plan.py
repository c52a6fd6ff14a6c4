"""How rounds split prompts, measure and stop, and what they refuse, without a model."""

import json

import polars as pl
import pytest

from align.pipeline.options.settings import load_settings
from align.pipeline.rounds.round_prompts import prompts_of_round
from align.pipeline.rounds.rounds_checks import open_rounds
from align.pipeline.rounds.rounds_evaluation import repeated_share, sample_means, stop_reason
from align.schemas.errors import UsageError
from align.schemas.round_options import RoundsOptions
from align.schemas.samples import Prompt
from support.refusals import refuses
from support.rooms import ROOT
from support.rounds_play import write_settings


def test_answers_are_measured_by_hand():
    # a b c d a b c d: 5 4-grams, of which the last, a b c d, is the first again.
    assert repeated_share(["a b c d a b c d"]) == pytest.approx(1 / 5)
    # 6 of the same word: 3 4-grams, 2 of them known. Together with the 5 above: 3 of 8.
    assert repeated_share(["x x x x x x", "a b c d a b c d"]) == pytest.approx(3 / 8)
    assert repeated_share(["a b c d", "a b c d"]) == 0  # another text may say the same
    columns = {"completion_tokens": [2, 6], "finish": ["stop", "length"], "score": [1.0, None]}
    table = pl.DataFrame({"completion": ["one two", "x x x x x"], **columns})
    measured = {"score": 1.0, "tokens": 4.0, "repeated_ngrams": 0.5, "cut": 0.5}
    assert sample_means(table) == {"samples": 2.0, **measured}


@pytest.mark.parametrize(
    ("rate", "growth", "options", "stops"),
    [
        (0.45, 1.0, {"min_win_rate": 0.5}, True),
        (0.5, 1.0, {"min_win_rate": 0.5}, False),
        (0.5, 1.6, {"max_length_growth": 1.5}, True),
        (0.5, 1.5, {"max_length_growth": 1.5}, False),
        (0.5, 5.4 / 4.5, {"max_length_growth": 1.2}, False),  # 1.2000000000000002
        (0.0, 100.0, {}, False),
    ],
)
def test_rounds_stop_at_the_bounds_and_at_nothing_else(rate, growth, options, stops):
    metrics = {"held_out/win_rate/previous": rate, "held_out/length_growth": growth}
    assert bool(stop_reason(2, metrics, RoundsOptions(**options))) == stops


def test_prompts_of_rounds_are_fresh_until_all_were_used():
    made = [Prompt(f"p{place}") for place in range(10)]
    rounds = [prompts_of_round(made, number, 4, 0) for number in (1, 2, 3)]
    drawn = [prompt.text for one in rounds for prompt in one]
    assert len(set(drawn[:10])) == 10
    assert drawn[10:] == drawn[:2]  # after the last the first comes again
    assert len(prompts_of_round(made, 1, 0, 0)) == len(prompts_of_round(made, 7, 99, 0)) == 10
    assert prompts_of_round(made[::-1], 2, 4, 0) == rounds[1] != prompts_of_round(made, 2, 4, 1)


def opened(folder, world, **changes):
    return open_rounds(load_settings({}, [], file=write_settings(folder, world, **changes)))


def test_the_example_is_taken_over_a_tiny_world_and_nothing_is_made_yet(world, tmp_path):
    (tmp_path / "world").symlink_to(world.folder)
    path = tmp_path / "rounds.yaml"
    path.write_text((ROOT / "examples" / "rounds.yaml").read_text())
    rounds = open_rounds(load_settings({}, [], file=path, command="rounds"))
    assert rounds.prompts
    assert rounds.held_out
    assert not (tmp_path / "align-rounds").exists()


def test_rounds_depend_on_the_template_of_their_judge(world, tmp_path):
    template, made = tmp_path / "own.j2", []
    judge = {"by": "rubric", "template": str(template)}
    for text in ("{{ messages }}{{ answer }}", "{{ messages }}: {{ answer }}"):
        template.write_text(text)
        made.append(opened(tmp_path, world, judge=judge, server={**SERVED, "revision": "1"}))
    assert made[0].must_match != made[1].must_match


def test_rounds_depend_on_how_their_model_is_computed(world, tmp_path):
    ways = ({}, {"attention": "eager"}, {"dtype": "bfloat16"})
    first, *others = (opened(tmp_path, world, model=way).must_match for way in ways)
    assert all(other != first for other in others)


def prompts_of(folder, *rows):
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"files": [str(path)]}


def test_columns_of_prompts_are_looked_at_before_any_work(world, tmp_path):
    few = {"eval_fraction": 0.0}
    for name in ("wins", "ties"):
        data = prompts_of(tmp_path, *({"prompt": f"p{n}", name: n} for n in range(4)))
        with refuses(UsageError, "data.files", name):
            opened(tmp_path, world, data=data, rounds=few)
    # A reference answer that the first prompt lacks.
    data = prompts_of(tmp_path, {"prompt": "p0"}, {"prompt": "p1", "answer": "a"})
    opened(tmp_path, world, data=data, rounds=few, judge={"by": "exact", "function": ""})


GRPO = {"train": {"method": "grpo"}, "cache": {"kl_pairs": 0, "token_logps": True}}
SERVED = {"url": "http://127.0.0.1:1/v1", "model": "m"}
TO_SERVE = "sh {model} {port}"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"judge": {"by": "rubric", "template": "rounds.yaml"}}, ("rounds.yaml", "answer")),
        ({"judge": {"by": "reward"}}, ("--reward-model",)),
        ({"judge": {"against": "elsewhere"}}, ("judge.against",)),
        ({"train": {"model": "elsewhere"}}, ("train.model",)),
        ({"train": {"method": "reward"}}, ("reward",)),
        ({"train": {"method": "kto"}}, ("kto", "cache.kl_pairs")),
        ({"train": {"eval_fraction": 0.1}}, ("train.eval_fraction",)),
        ({"train": {"eval_cache": "elsewhere"}}, ("train.eval_cache",)),
        ({"select": {"rows": "labels"}}, ("select.rows", "pairs")),
        ({**GRPO, "sample": {"temperature": 0.7}}, ("temperature 0.7", "train.other_sampling")),
        ({"rounds": {"eval_n": 2}}, ("rounds.eval_n",)),
        ({"rounds": {"eval_fraction": 0.0, "min_win_rate": 0.5}}, ("rounds.eval_fraction",)),
        ({"rounds": {"output": "s3://bucket/rounds"}}, ("s3://bucket/rounds",)),
        ({"rounds": {"serve": "sh {model} {url}"}}, ("rounds.serve", "{url}")),
        ({"server": {"url": "http://127.0.0.1:1/v1"}}, ("server.url", "rounds.serve")),
        ({"lora": {"enabled": True}, "model": {"adapter": "a"}}, ("model.adapter",)),
        ({"rounds": {"serve": TO_SERVE}, "model": {"adapter": "a"}}, ("model.adapter",)),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(world, tmp_path, changes, names):
    path = write_settings(tmp_path, world, **changes)
    with refuses(UsageError, *names):
        open_rounds(load_settings({}, [], file=path))


def test_rounds_of_grpo_sample_as_the_policy_is(world, tmp_path, monkeypatch):
    assert opened(tmp_path, world, **GRPO).config.train.method == "grpo"
    meant = {"method": "grpo", "other_sampling": True}
    opened(tmp_path, world, **GRPO | {"train": meant, "sample": {"temperature": 0.7}})
    opened(tmp_path, world, sample={"temperature": 0.7})
    monkeypatch.setenv("WORLD_SIZE", "2")  # by a launcher
    with refuses(UsageError, "launcher"):
        opened(tmp_path, world)
