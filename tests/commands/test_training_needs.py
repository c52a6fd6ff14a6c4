"""A cache that lacks what an objective needs is refused in one message, before a step."""

import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.pipeline.options.settings import load_settings
from align.pipeline.plan.cache_checks import sampling_note
from align.pipeline.precompute.export import export
from align.pipeline.precompute.precompute import precompute
from align.pipeline.precompute.verify import verify
from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.json_codec import to_signed_json
from align.schemas.samples import Distribution
from align.stages.engine.distributed import joined_world
from align.stages.model.reference import HfReference
from align.stages.report.cache_summary import render, summarize
from align.stages.storage.cache import Cache
from support.refusals import refuses
from support.stage_one import Silent
from support.training_world import facts, job_of, session_of, trained

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def scored_groups(training_world, tmp_path_factory):
    """A cache of eight groups of three: scores 1, 2 and 6, but of two groups 5, 5 and 5."""
    folder = tmp_path_factory.mktemp("needs")
    columns = {
        "prompt": [f"Say the number {n}." for n in range(8)],
        "completions": [[f"It is {n}.", f"Here: {n}.", f"{n} and more"] for n in range(8)],
        "scores": [[5.0] * 3 if n < 2 else [1.0, 2.0, 6.0] for n in range(8)],
    }
    pq.write_table(pa.table(columns), folder / "scored.parquet")
    flags = {"model.path": str(training_world.model), "cache.output": str(folder / "cache")}
    sets = {"cache.token_logps": True, "tracking.mlflow": False, "tokens.max_length": 512}
    data = [str(folder / "scored.parquet")]
    config = load_settings(flags, sets, file=None, data=data).config
    precompute(config, HfReference(config.model), progress=Silent())
    return folder / "cache"


class NeverOpened(HfReference):
    """A reference that is not to be run."""

    def open(self):
        raise AssertionError("a forward pass")


def test_an_unscored_cache_serves_what_needs_no_scores(training_world, here):
    """Its trainings are those of a scored cache of the same rows, bit for bit."""

    next_steps = []

    def made(name, reference, **settings):
        plain = {"cache.shards": 8, "cache.kl_pairs": 2, "tokens.max_length": 512}
        sets = plain | {"tracking.mlflow": False, "cache.reuse_known": False} | settings
        flags = {"model.path": str(training_world.model), "cache.output": str(here / name)}
        file = str(training_world.pairs.parent / "pairs.parquet")
        config = load_settings(flags, sets, file=None, data=[file]).config
        answer = precompute(config, reference(config.model), progress=Silent())
        next_steps.append(answer.text())
        return here / name

    unscored = made("unscored", NeverOpened, **{"cache.scored": False})
    tables = [pq.read_table(folder / "data") for folder in (unscored, training_world.pairs)]
    empty, full = (table.drop_columns("ref_logp") for table in tables)
    assert empty.equals(full)
    assert {one for row in tables[0]["ref_logp"].to_pylist() for one in row} == {None}

    for method in ("orpo", "simpo+sft"):
        left = []
        for number, cache in enumerate((unscored, training_world.pairs)):
            run = here / f"{method}-{number}"
            trained(job_of(cache, method, output=str(run), max_steps=3, eval_fraction=0.3))
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            weights = (run / "model" / "model.safetensors").read_bytes()
            told = [facts({**line, "time": None}) for line in lines]
            left.append((told, weights))
        assert left[0] == left[1]
    for method in ("dpo", "kto", "orpo:1+dpo:1"):
        with refuses(UsageError, method, unscored, "cache.scored"):
            job_of(unscored, method)
    with refuses(UsageError, "cache.scored"):
        job_of(training_world.pairs, "dpo", eval_cache=str(unscored))

    assert "cache.scored" in verify(
        unscored, ModelOptions(), model=None, rescore=4, open_reference=NeverOpened
    )
    for asked, method in (("", "orpo"), ("kto", "orpo"), ("simpo", "simpo")):
        made("unscored", NeverOpened, **{"cache.scored": False, "train.method": asked})
        assert f"--method {method} " in next_steps[-1]
    summary = summarize(Cache(unscored))
    assert "cache.scored" in render(summary)
    assert "prefers" not in render(summary)
    assert summary["pairs"]["reference_prefers_rejected"] is None
    assert {one["logps"] for one in summary["roles"].values()} == {None}
    with refuses(UsageError, "cache.scored"):
        export(unscored, here / "flat.parquet", model=None, overwrite=False)
    again = made("scored", HfReference, **{"cache.reuse": [str(unscored)]})
    assert Cache(again).manifest().root == Cache(training_world.pairs).manifest().root


def test_a_cache_to_evaluate_on_has_to_have_what_is_needed_too(training_world, scored_groups):
    with refuses(UsageError, training_world.pairs, "--token-logps"):
        job_of(scored_groups, "grpo", eval_cache=str(training_world.pairs))


def test_only_grpo_and_ppo_refuse_samples_that_the_reference_did_not_draw(scored_groups, tmp_path):
    def drawn_at(*drawn):
        folder = tmp_path / "-".join(map(str, drawn))
        if not folder.exists():
            shutil.copytree(scored_groups, folder)
            told = replace(Cache(folder).manifest(), sampling=(Distribution(*drawn),))
            (folder / "manifest.json").write_text(to_signed_json(told))
        return folder

    def told(cache, method="grpo"):
        job = job_of(cache, method, other_sampling=True)
        return sampling_note(job.objective, job.manifest)

    for method in ("grpo", "ppo"):
        with refuses(UsageError, "temperature 0.7, top-k 50", "train.other_sampling"):
            job_of(drawn_at(0.7, 1.0, 50), method)
        with refuses(UsageError, "temperature 1, top-p 0.5"):
            job_of(scored_groups, method, eval_cache=str(drawn_at(1.0, 0.5, 0)))
        assert "temperature 0.7, top-k 50" in told(drawn_at(0.7, 1.0, 50), method)
        assert job_of(drawn_at(1.0, 1.0, 0), method).objective.name == method
    for method in ("dpo", "kto"):
        assert job_of(drawn_at(0.7, 1.0, 50), method).objective.name == method
    assert "1 data file" in told(scored_groups)
    assert told(scored_groups, "dpo") == ""


def test_rows_past_the_last_position_are_refused(training_world, scored_groups, tmp_path):
    def ending_at(last, method, cache=training_world.pairs, **settings):
        """The longest row of a policy with so many positions."""
        folder = shutil.copytree(training_world.model, tmp_path / str(last), dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": last}))
        job = job_of(cache, method, model=str(folder), other_reference=True, **settings)
        with joined_world() as world:
            return session_of(job, world).source.longest

    rows = pq.read_table(training_world.pairs / "data").to_pylist()
    own = max(len(row["prompt_ids"]) + max(row["num_tokens"][:2]) for row in rows)
    every = max(len(row["prompt_ids"]) + max(row["num_tokens"]) for row in rows)
    assert ending_at(own, "dpo") == own
    with refuses(UsageError, f"{own} tokens"):
        ending_at(own - 1, "dpo")
    with refuses(UsageError, f"{every} tokens"):
        ending_at(every - 1, "kto")  # of a mismatched completion
    evaluated = {"eval_cache": str(training_world.pairs)}
    assert ending_at(own, "dpo", scored_groups, **evaluated) < own - 1
    with refuses(UsageError, f"{own} tokens"):
        ending_at(own - 1, "dpo", scored_groups, **evaluated)
    control = ending_at(own + 100, "csft") - own
    with refuses(UsageError, f"{control} of them", "csft", "--max-length"):
        ending_at(own, "csft")
