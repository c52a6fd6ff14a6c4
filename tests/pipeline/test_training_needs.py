"""What a recipe needs of a cache: refused in one message where it is not there, before a step."""

import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from align.pipeline.precompute import precompute
from align.pipeline.resume import require_same_settings
from align.pipeline.settings import as_absolute, load_settings
from align.pipeline.train_checks import sampling_note
from align.pipeline.training_job import open_training
from align.schemas.errors import FingerprintError, UsageError
from align.schemas.json_codec import to_json
from align.schemas.rows import Role
from align.schemas.samples import Drawing
from align.stages.engine.distributed import joined_world
from align.stages.feed.cache_index import ShardColumns, unchecked
from align.stages.feed.train_source import open_source
from align.stages.model.reference import HfReference
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from align.stages.tracking.progress import NoProgress
from support.command import refusal
from support.training_world import job_of, session_of

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def make(course):
    """Makes a cache of rows given as columns."""

    def made(name, *more, **columns):
        folder = course.folder / name
        data = course.folder / f"{name}.parquet"
        pq.write_table(pa.table(columns), data)
        words = ("--model", course.model, "--output", folder, "--no-mlflow")
        answer = course.server.run("precompute-ref", data, *words, *more)
        assert answer.code == 0, answer
        return folder

    return made


@pytest.fixture(scope="module")
def scored_groups(make):
    """Eight groups of three: scores 1, 2 and 6, but of two groups 5, 5 and 5; with every token."""
    return make(
        "scored",
        "--token-logps",
        prompt=[f"Say the number {n}." for n in range(8)],
        completions=[[f"It is {n}.", f"Here: {n}.", f"{n} and more"] for n in range(8)],
        scores=[[5.0] * 3 if n < 2 else [1.0, 2.0, 6.0] for n in range(8)],
    )


@pytest.fixture(scope="module")
def unscored(course):
    """Groups nobody has scored; stage 1 refuses them, but caches of such are about."""
    data, folder = course.folder / "unscored.parquet", course.folder / "unscored"
    rows = {"prompt": ["Why?", "How?"], "completions": [["So.", "Well."], ["Yes.", "No."]]}
    pq.write_table(pa.table(rows), data)
    flags = {"model.path": str(course.model), "cache.output": str(folder)}
    sets = {"cache.token_logps": True, "tracking.mlflow": False}
    config = load_settings(flags, sets, file=None, data=[str(data)]).config
    precompute(config, HfReference(config.model), progress=NoProgress(), stage="score")
    return folder


def refused(course, *arguments):
    """Gives a command that is refused before ranks meet or a weight is read."""
    words = ("train", "--cache", course.cache, "--method", "dpo", "--no-mlflow", *arguments)
    return refusal(2, *words)


def refused_by_rank(course, run, *arguments):
    """Gives a command that is refused once the lengths of the cache are read."""
    (answer,) = course.start(run, *arguments).answers()
    assert answer.code == 2, answer
    assert "Traceback" not in answer.out + answer.err
    assert not (run / "metrics.jsonl").exists()
    return " ".join(answer.err.partition("error: ")[2].split())


def trained(course, run, *arguments):
    """What a short run says, its lines joined."""
    return " ".join(course.run(run, *arguments, "--max-steps", 2).err.split())


@pytest.mark.parametrize(
    "more",
    [
        ("--set", "method.humanline=true"),
        ("--set", "method.ld_alpha=0.5"),
        ("--method", "grpo"),
        ("--method", "kto", "--set", "method.humanline=true"),
    ],
    ids=str,
)
def test_a_cache_of_sums_is_refused_to_who_reads_tokens(course, more):
    said = refused(course, *more)
    assert "needs the reference's log-prob of every token" in said
    assert "`align precompute-ref … --token-logps --output OTHER`" in said


def test_a_cache_to_evaluate_on_has_to_have_what_is_needed_too(course, scored_groups):
    more = ("--method", "grpo", "--set", f"train.eval_cache={course.cache}")
    assert f"{course.cache} keeps their sums only" in refused(
        course, "--cache", scored_groups, *more
    )


@pytest.fixture
def drawn_at(scored_groups, tmp_path):
    """The cache of groups, as one of samples that were drawn so."""

    def copied(*drawn):
        folder = shutil.copytree(scored_groups, tmp_path / "-".join(map(str, drawn)))
        told = replace(load_manifest(CacheFolder(folder)), sampling=drawn)
        (folder / "manifest.json").write_text(to_json(told))
        return folder

    return copied


@pytest.mark.parametrize("method", ["grpo", "ppo", "dpo", "kto"])
def test_only_grpo_and_ppo_refuse_samples_that_the_reference_did_not_draw(drawn_at, method):
    cache = drawn_at(Drawing(0.7, 1.0, 50))
    if method not in {"grpo", "ppo"}:
        assert job_of(cache, method).recipe.name == method
        return
    with pytest.raises(UsageError, match=r"drawn at temperature 0\.7, top-k 50\. .*other_sampling"):
        job_of(cache, method)
    assert job_of(cache, method, other_sampling=True).recipe.name == method
    assert job_of(drawn_at(Drawing(1.0, 1.0, 0)), method).recipe.name == method


def test_samples_of_a_cache_to_evaluate_on_are_drawn_by_the_reference_too(drawn_at, scored_groups):
    with pytest.raises(UsageError, match=r"drawn at temperature 1, top-p 0\.5"):
        job_of(scored_groups, "grpo", eval_cache=str(drawn_at(Drawing(1.0, 0.5, 0))))


def test_how_the_samples_of_a_cache_were_drawn_is_told(drawn_at, scored_groups):
    def told(cache, method="grpo"):
        job = job_of(cache, method, other_sampling=True)
        return sampling_note(job.recipe, job.manifest)

    assert "drawn at temperature 0.5, top-p 0.9;" in told(drawn_at(Drawing(0.5, 0.9, 0)))
    assert "not known of 1 data file;" in told(scored_groups)
    assert told(scored_groups, "dpo") == ""


@pytest.mark.parametrize(
    "name", ["sync_reference", "dpo.sync_reference", "sync_ref_model", "ref_model_mixup_alpha"]
)
def test_a_reference_that_moves_is_refused_with_what_to_do_instead(course, name):
    said = refused(course, "--set", f"method.{name}=true")
    assert f"method.{name} would move the reference" in said
    assert "Go round by round: train, make a cache with the trained model" in said
    assert "--model RUN/model" in said


@pytest.mark.parametrize("given", ["modus", ".inf", "nan", ""])
def test_a_threshold_is_mean_median_or_a_number(course, given):
    said = refused(course, "--method", "kto", "--set", f"train.label_threshold={given}")
    assert "expected mean, median or a number" in said


def test_a_least_gap_is_not_negative(course):
    said = refused(course, "--set", "train.min_score_gap=-1")
    assert "train.min_score_gap: expected a number of at least 0, found -1" in said


def test_control_texts_have_to_differ(course):
    alike = ("--set", "method.good_token=x", "--set", "method.bad_token=x")
    assert "are empty or alike" in refused(course, "--method", "csft", *alike)
    empty = ("--set", "method.bad_token=''")
    assert "are empty or alike" in refused(course, "--method", "csft", *empty)


def test_control_texts_are_tokens_of_the_policy(course, tokenizer_folder):
    flags = {"train.method": "csft", "train.cache": str(course.cache)}
    sets = ["method.good_token= fine", "method.bad_token= bad indeed"]
    job = open_training(load_settings(flags, sets, file=None))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert job.reading.context == {
        role: tuple(tokenizer.encode(text, add_special_tokens=False))
        for role, text in {Role.DESIRABLE: "fine", Role.UNDESIRABLE: "bad indeed"}.items()
    }
    assert len(set(job.reading.context.values())) == 2


def test_control_texts_are_for_one_method_alone(course):
    assert "csft shows the policy other prompts" in refused(course, "--method", "kto+csft")


@pytest.mark.parametrize("option", ["margin", "row_weight"])
def test_a_column_that_the_cache_does_not_carry_is_named(course, here, option):
    more = ("--method", "dpo", "--set", f"method.{option}=trust")
    said = refused_by_rank(course, here / "run", *more)
    assert "carries no column 'trust'" in said
    assert "--set data.carry=[trust]" in said


def test_a_column_that_is_carried_is_read(course, here, make):
    cache = make(
        "weighed",
        *("--set", "data.carry=[trust]"),
        prompt=["Why?", "How?", "When?"],
        chosen=["So.", "Yes.", "Now."],
        rejected=["Well.", "No.", "Then."],
        trust=[0.5, 1.0, 2.0],
    )
    more = ("--cache", cache, "--method", "dpo", "--set", "method.row_weight=trust")
    trained(course, here / "run", *more, "--eval-fraction", 0, "--eval-every", 0)


def test_pairs_without_scores_are_refused_to_who_reads_scores(course, here):
    said = refused_by_rank(course, here / "run", "--method", "rpo_sq", "--eval-every", 0)
    assert "The method reads scores, and in 60 rows of" in said
    assert "`align score`" in said
    assert "'chosen_score' and 'rejected_score'" in said


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_groups_without_scores_are_refused(course, here, unscored, method):
    said = refused_by_rank(course, here / "run", "--cache", unscored, "--method", method)
    assert "in 2 rows of" in said
    assert "the column 'scores'" in said


@pytest.mark.parametrize("method", ["dpo", "kto", "sft"])
def test_groups_without_scores_give_neither_pairs_nor_labels(course, here, unscored, method):
    said = refused_by_rank(course, here / "run", "--cache", unscored, "--method", method)
    assert "2 of 2 scored rows are left out: a completion of each has no score." in said
    assert "`align score`" in said


WHOLE = ("--eval-fraction", 0, "--eval-every", 0)


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("dpo", ("--set", "train.pairs_from_scores=all"), "6 scored rows are read as 18 pairs"),
        ("kto", ("--set", "train.label_threshold=1.5"), "desirable above 1.5, undesirable below"),
        ("rpo_sq", (), "6 scored rows are read as 6 pairs"),
        ("sft", (), "8 scored rows are read as what to imitate"),
        # Six rows of three labels, each of them a row of its own.
        ("csft", (), "18 rows to learn from"),
        ("grpo", (), "samples: not known of 1 data file"),
    ],
)
def test_scored_rows_serve_every_method(course, here, scored_groups, method, more, said):
    words = ("--cache", scored_groups, "--method", method, *WHOLE, *more)
    assert said in trained(course, here / "run", *words)
    lines = (here / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["grad_norm"] > 0 for line in lines)


def test_class_weights_follow_the_labels_that_scores_make(scored_groups):
    """Of 1, 2 and 6 one lies above the mean, two below: auto weighs the one twice."""
    flags = {"train.method": "kto", "train.cache": str(scored_groups)}
    job = open_training(load_settings(flags, ["method.desirable_weight=auto"], file=None))
    source = open_source(job.cache, job.manifest, job.reading, ShardColumns(unchecked))
    recipe, _ = job.recipe.resolve_auto(source.labels)
    assert (source.labels.desirable, source.labels.undesirable) == (6, 12)
    assert recipe.values["desirable_weight"] == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.pairs_from_scores", "all"),
        ("train.min_score_gap", "2"),
        ("train.label_threshold", "median"),
    ],
)
def test_how_scores_are_read_cannot_change_within_a_run(name, value):
    begun, now = (
        as_absolute(load_settings({}, sets, file=None).config) for sets in ([], [f"{name}={value}"])
    )
    with pytest.raises(FingerprintError, match=f"{name}: begun with"):
        require_same_settings(begun, now)


@pytest.fixture
def ending_at(training_world, tmp_path):
    """A policy with so many positions, about to learn from pairs by a method."""

    def start(last, method):
        folder = shutil.copytree(training_world.model, tmp_path / f"model-{last}")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": last}))
        job = job_of(training_world.pairs, method, model=str(folder), other_reference=True)
        with joined_world() as world:
            return session_of(job, world)

    return start


def test_control_tokens_past_the_last_position_are_refused_before_the_first_step(
    training_world, ending_at
):
    rows = pq.read_table(training_world.pairs / "data").to_pylist()
    longest = max(len(row["prompt_ids"]) + max(row["num_tokens"][:2]) for row in rows)
    with pytest.raises(UsageError) as found:
        ending_at(longest, "csft")
    control = ending_at(longest + 100, "csft").source.index.longest - longest
    assert control > 0
    said = str(found.value)
    assert f"has {longest + control} tokens, {control} of them those that csft puts" in said
    assert f"last position is {longest}." in said
    assert f"--max-length {longest - control}" in said
    assert ending_at(longest + control, "csft").source.index.longest == longest + control
    with pytest.raises(UsageError, match=f"longest row .* has {longest} tokens, and"):
        ending_at(longest - 1, "dpo")


def test_a_mismatched_completion_past_the_last_position_is_refused(training_world, ending_at):
    rows = pq.read_table(training_world.pairs / "data").to_pylist()
    own = max(len(row["prompt_ids"]) + max(row["num_tokens"][:2]) for row in rows)
    every = max(len(row["prompt_ids"]) + max(row["num_tokens"]) for row in rows)
    assert every >= own
    assert ending_at(own, "dpo").source.index.longest == own
    with pytest.raises(UsageError, match=f"has {every} tokens"):
        ending_at(every - 1, "kto")


def test_ranks_that_cannot_be_divided_into_groups_are_refused(course):
    said = refused(course, "--set", "train.sequence_parallel=2")
    assert "train.sequence_parallel is 2, and 1 ranks were started. Start a multiple of it" in said
