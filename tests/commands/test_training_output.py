"""What a run leaves behind, read by others."""

import html
import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.pipeline.train.records import record_warnings
from align.pipeline.train.run_report import write_report
from align.schemas.cache import StopTokens
from align.schemas.rows import Role
from align.stages.report.eval_table import read_answers, read_samples
from align.stages.storage.cache import Cache
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.run_record import RunRecord
from support.command import refusal
from support.mlflow_runs import id_on_disk, open_store, run_of, stored
from support.refusals import require_names
from support.stage_one import contents
from support.tracked_training import begin, logged_numbers, run_folder
from support.trainings import weights

TOKENS = 6
ANSWERS = ("--answers", 3, "--answer-tokens", TOKENS)


@pytest.fixture(scope="module")
def few(course, world, tmp_path_factory):
    """A cache of twelve rows, on which runs are evaluated."""
    folder = tmp_path_factory.mktemp("few")
    pq.write_table(pq.read_table(world.data.paired).slice(0, 12), folder / "few.parquet")
    made = ("--model", course.model, "--output", folder / "cache-of-few", "--no-mlflow")
    course.server.success("precompute-ref", folder / "few.parquet", *made)
    return folder / "cache-of-few"


@pytest.fixture(scope="module")
def finished(course, few, uri, tmp_path_factory):
    """Gives the folder of a run that was evaluated, `said` beside it."""

    def train(*more):
        run = tmp_path_factory.mktemp("output") / "run"
        evaluated = ("--eval-fraction", 0, "--set", f"train.eval_cache={few}", "--eval-every", 2)
        tracked = ("--mlflow", "--set", f"tracking.uri={uri}")
        said = course.run(run, *evaluated, *tracked, *more).err
        (run.parent / "said").write_text(said)
        return run

    return train


@pytest.fixture(scope="module")
def plain(finished, course):
    """The whole policy was trained; the checkpoint kept beside the last is the best by a metric."""
    run = finished("--set", "train.best=-eval/rewards/rejected", "--keep-last", 1)
    return answered(run, course)


def answered(run, course):
    """The run with answers in its report."""
    course.server.success("report", run, *ANSWERS, "--config", run / "config.yaml")
    return run


def id_in(run):
    return id_on_disk(RunFolder(run))


def kept_by_mlflow(uri, run):
    """Every artifact by its name, and where it lies."""
    root = Path(run_of(uri, id_in(run)).info.artifact_uri.removeprefix("file://"))
    return {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}


def measured(run):
    """The metrics of each step."""
    at_step = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        at_step.setdefault(line["step"], {}).update(line)
    return at_step


@torch.no_grad()
def mean_logps(model, cache, role):
    """By one plain forward pass per completion, of all completions of a role."""
    sums = []
    for row in pq.read_table(cache / "data").to_pylist():
        for completion, its_role in zip(row["completion_ids"], row["role"], strict=True):
            if its_role != role:
                continue
            ids = torch.tensor([row["prompt_ids"] + completion])
            logps = model(ids).logits[0, :-1].double().log_softmax(-1)
            own = logps[-len(completion) :].gather(1, torch.tensor(completion)[:, None])
            sums.append(float(own.sum()))
    return sum(sums) / len(sums)


def agrees(model, run, cache):
    """Whether the model gives the log-probs that the last evaluation of its run found."""
    named = {"eval/logps/chosen": Role.CHOSEN, "eval/logps/rejected": Role.REJECTED}
    last = measured(run)
    expected = {name: last[max(last)][name] for name in named}
    found = {name: mean_logps(model, cache, role) for name, role in named.items()}
    return found == pytest.approx(expected, abs=1e-3)


def test_the_saved_model_is_the_policy_that_was_evaluated_last(plain, course, few):
    assert agrees(AutoModelForCausalLM.from_pretrained(plain / "model"), plain, few)
    assert not agrees(AutoModelForCausalLM.from_pretrained(course.model), plain, few)
    found, expected = (
        json.loads((folder / "config.json").read_text())
        for folder in (plain / "model", course.model)
    )
    assert found == expected | {"dtype": "float32"}
    names = {path.name for path in course.model.iterdir()} - {"config.json", "model.safetensors"}
    assert "tokenizer.json" in names
    for name in names:
        assert (plain / "model" / name).read_bytes() == (course.model / name).read_bytes()


def test_its_card_names_everything_it_came_from(plain, course):
    manifest = json.loads((course.cache / "manifest.json").read_text())
    card = (plain / "model" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["library_name"], "base_model" in front) == ("transformers", False)
    assert {"align", "kto"} <= set(front["tags"])
    for said in (
        manifest["root"],
        manifest["fingerprint"]["model.weights"],
        f"| reference | {course.folder.name} |",
        manifest["inputs"][0]["sha256"],
        id_in(plain),
        RunRecord.find(RunFolder(plain)).facts.key,
        "| beta | 0.1 |",
        "| train.lr | 0.001 |",
        "24 rows seen out of 60",
        "| eval/loss | ",
        "<\\|im_end\\|> (1), as the chat template writes it |",
    ):
        assert said in card


@torch.no_grad()
def likeliest(model, prompt, stops):
    """The likeliest tokens one by one, each by a plain forward pass, and whether they ended."""
    tokens = []
    while len(tokens) < TOKENS:
        token = int(model(torch.tensor([prompt + tokens])).logits[0, -1].argmax())
        if token in stops:
            return tokens, True
        tokens.append(token)
    return tokens, False


def are_its_answers(run, cache, before, after):
    """Whether the run has written down what the two models answer."""
    manifest, rows = Cache(cache).manifest(), pq.read_table(cache / "data").to_pylist()
    stops = StopTokens.of(manifest.fingerprint).tokens
    prompts = {row["row_id"]: row["prompt_ids"] for row in rows}
    text = AutoTokenizer.from_pretrained(manifest.model).decode
    found = read_answers(RunFolder(run).answers)
    assert found["prompt"].n_unique() == 3
    for one in found.iter_rows(named=True):
        prompt = prompts[one["row_id"]]
        assert one["prompt"] in text(prompt)
        for model, when in ((before, "before"), (after, "after")):
            tokens, has_stopped = likeliest(model, prompt, stops)
            assert text(prompt + tokens) == text(prompt) + one[when]
            assert has_stopped == one[f"{when}_ended"]
    return True


def test_answers_before_and_after_training_are_shown(plain, course, few):
    before, after = map(AutoModelForCausalLM.from_pretrained, (course.model, plain / "model"))
    assert are_its_answers(plain, few, before, after)
    page = html.unescape(RunFolder(plain).report.read_text())
    for texts in read_answers(RunFolder(plain).answers)["prompt", "before", "after"].iter_rows():
        assert all(text in page for text in texts)


def test_a_longer_run_forgets_its_answers(plain, course, tmp_path):
    run = shutil.copytree(plain, tmp_path / "run")
    RunFolder(run).answers.unlink()
    RunFolder(run).run_record.unlink()
    asked = ("report", run, *ANSWERS)
    course.server.success(*asked, cwd=tmp_path)
    assert RunFolder(run).answers.read_bytes() == RunFolder(plain).answers.read_bytes()
    ending = RunFolder(run).ending
    kept = ending.read_bytes()
    ending.unlink()  # as of a run that learned on and was killed
    for words in (asked, ("register", run, "prefs")):
        refusal(2, *words, names=(run, "--resume auto"))
    ending.write_bytes(kept)
    longer = ("--max-steps", 7, "--no-mlflow", "--resume", "auto")
    again = ("--config", plain / "config.yaml", "--output", run, *longer)
    course.server.success("train", *again)
    assert not RunFolder(run).answers.exists()


def test_its_config_file_makes_the_same_model_again(plain, course, tmp_path):
    again = ("--config", plain / "config.yaml", "--output", tmp_path / "run", "--no-mlflow")
    course.server.success("train", *again)
    assert weights(tmp_path / "run") == weights(plain)


def test_mlflow_knows_all_of_a_run(plain, course, few, uri):
    run_id = id_in(plain)
    assert stored(uri, run_id) == logged_numbers(plain)
    names = {name for name, *_ in logged_numbers(plain)}
    assert {"loss", "lr", "grad_norm", "kl/raw", "speed/tokens_per_second", "eval/loss"} <= names
    told = run_of(uri, run_id)
    manifest = Cache(course.cache).manifest()
    data = Path(manifest.inputs[0].name).stem
    assert told.info.run_name == f"{course.model.parent.name} · kto · {data}"
    note, params = told.data.tags["mlflow.note.content"], told.data.params
    for said in (params["rows.train"], str(plain), str(course.cache), "method.beta", "train.lr"):
        assert said in note
    assert params["model.path"] == params["train.model"] == str(course.model)
    assert (params["train.dtype"], params["train.tokens_per_batch"]) == ("float32", "2048")
    assert "train.resume" not in params
    given = {
        one.dataset.name: {tag.key: tag.value for tag in one.tags}["align.digest"]
        for one in told.inputs.dataset_inputs
    }
    files = {entry.name: entry.sha256 for entry in manifest.inputs}
    measured_on = Cache(few).manifest().root
    assert given == {**files, course.cache.name: manifest.root, few.name: measured_on}
    (made,) = told.outputs.model_outputs
    assert made.step == RunFolder(plain).steps()[-1]
    model = open_store(uri).get_logged_model(made.model_id)
    at_step = measured(plain)[made.step]
    held_out = {name: value for name, value in at_step.items() if name.startswith("eval/")}
    assert {(one.key, one.step, one.value) for one in model.metrics} == {
        (name, made.step, value) for name, value in held_out.items()
    }
    data = {(one.dataset_name, one.dataset_digest) for one in model.metrics}
    assert data == {(few.name, measured_on[:36])}
    kept = kept_by_mlflow(uri, plain)
    tables = {f"evaluations/step-0000000{step}.csv" for step in (0, 2, 4, 6)}
    pages = {path.name for path in RunFolder(plain).pages}
    own = {*pages, "config.yaml", "deepspeed.json", "model/README.md", *tables}
    drawn = {name.partition(".")[0] for name in (*tables, "answers.jsonl")}
    assert set(kept) == {
        *own,
        "metrics.jsonl",
        "manifest.json",
        *(f"{name}.json" for name in drawn),
    }
    shown = json.loads(told.data.tags["mlflow.loggedArtifacts"])
    assert {(one["path"], one["type"]) for one in shown} == {
        (f"{one}.json", "table") for one in drawn
    }
    answers = json.loads(kept["answers.json"].read_text())
    known = read_answers(RunFolder(plain).answers)
    lines = [dict(zip(answers["columns"], line, strict=True)) for line in answers["data"]]
    assert lines == known.to_dicts()
    samples = json.loads(kept["evaluations/step-00000006.json"].read_text())
    at = samples["columns"].index("logp")
    logps = read_samples(RunFolder(plain).evaluation(6))["logp"].to_list()
    assert [line[at] for line in samples["data"]] == logps
    for name in own:
        assert kept[name].read_bytes() == (plain / name).read_bytes()


def test_a_finished_run_becomes_a_version(plain, course, uri, tmp_path):
    store, client = ("--uri", uri), open_store(uri)

    def registered(run, *more):
        answer = course.server.success("register", run, "prefs", *more, *store, cwd=tmp_path)
        return answer.out

    require_names(registered(plain, "--alias", "champion"), "version 1", "champion")
    assert "version 1" in registered(plain)
    learned_on = shutil.copytree(plain, tmp_path / "run")
    (learned_on / "model" / "README.md").write_text("of a longer run")
    assert "version 2" in registered(learned_on)
    assert client.get_model_version_by_alias("prefs", "champion").version == 1
    for version, run in ((1, plain), (2, learned_on)):
        made = client.get_model_version("prefs", version)
        assert made.run_id == id_in(plain)
        kept = Path(client.get_model_version_download_uri("prefs", version).removeprefix("file://"))
        assert contents(kept) == contents(run / "model")
    registered(learned_on, "--alias", "champion")
    assert client.get_model_version_by_alias("prefs", "champion").version == 2

    shutil.rmtree(learned_on / "model")
    refusal(2, "register", learned_on, "prefs", *store, names=(learned_on, "model"))
    # Another store than the run names.
    refusal(2, "register", plain, "prefs", names=(uri, "--uri"))
    unrecorded = shutil.copytree(plain, tmp_path / "unrecorded")
    RunFolder(unrecorded).run_record.unlink()
    refusal(2, "register", unrecorded, "prefs", *store, names=(unrecorded, "MLflow"))


def test_a_model_in_bfloat16_is_uploaded_as_it_was_saved(finished, uri):
    run = finished(
        *("--max-steps", 2, "--dtype", "bfloat16", "--set", "tracking.upload_model=true"),
        *("--set", "tracking.system_metrics=true"),
    )
    kept = kept_by_mlflow(uri, run)
    for path in (run / "model").iterdir():
        assert kept[f"model/{path.name}"].read_bytes() == path.read_bytes()
    assert json.loads((run / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(run / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert any(name.startswith("system/cpu") for name in measured(run)[2])


def test_the_newest_and_the_best_checkpoint_stay(plain):
    at_step = measured(plain)
    best = min((2, 4, 6), key=lambda step: at_step[step]["eval/rewards/rejected"])
    assert best != 6, "the best is another than the newest, or this shows nothing"
    kept = sorted((plain / "checkpoints").glob("step-*"))
    assert [int(path.name[5:]) for path in kept] == [best, 6]
    for path in kept:
        state = json.loads((path / "align_checkpoint.json").read_text())["state"]
        known = at_step[state["step"]]
        assert state["metrics"] == {n: known[n] for n in known.keys() - {"step", "time"}}
        assert "eval/loss" in known


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_others_load_an_adapter_and_its_merged_model(finished, course, few):
    """And a best metric that is never measured is reported."""
    best = ("--set", "train.best=eval/los")
    run = finished("--lora", "--merge", "--set", "lora.rank=4", "--no-mlflow", *best)
    said = (run.parent / "said").read_text()
    assert said.count("'eval/loss'?") == 1
    model = AutoPeftModelForCausalLM.from_pretrained(run / "model")
    assert agrees(model.eval(), run, few)
    settings = json.loads((run / "model" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(course.model)
    assert not list((run / "model").glob("model*.safetensors"))
    merged = run / "model-merged"
    assert agrees(AutoModelForCausalLM.from_pretrained(merged), run, few)
    plain = AutoModelForCausalLM.from_pretrained(course.model)
    assert are_its_answers(answered(run, course), few, plain, model)
    tensors, base = (load_file(folder / "model.safetensors") for folder in (merged, course.model))
    assert tensors.keys() == base.keys()
    changed = {name for name in base if not torch.equal(tensors[name], base[name])}
    assert changed == {name for name in base if "_proj" in name}
    # A merged model of fewer steps would be taken for this one.
    on = ("--config", run / "config.yaml", "--output", run, "--resume", "auto", "--max-steps", 7)
    course.server.success("train", *on, "--set", "lora.merge=false")
    assert not merged.exists()


NF4 = ("--lora", "--set", "lora.quantize=nf4")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_run_in_four_bits_learns_an_adapter(course, tmp_path):
    folder = tmp_path / "run"
    said = " ".join(course.run(folder, *NF4, "--merge", "--method", "dpo").err.split())
    # The gate says how far from the reference it begins.
    (gap,) = re.findall(r"largest difference (\S+) nats per completion", said)
    assert float(gap) > 0.01  # NF4 has 16 values
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[-1] < losses[0]
    # The adapter is for the plain weights, and is merged into them.
    settings = json.loads((folder / "model" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(course.model)
    plain = AutoPeftModelForCausalLM.from_pretrained(folder / "model").merge_and_unload()
    merged = load_file(folder / "model-merged" / "model.safetensors")
    base = load_file(course.model / "model.safetensors")
    assert merged.keys() == base.keys()
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in merged.items())
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {name for name in base if "_proj" in name}


def test_the_warnings_are_a_tag_of_a_trackers_run(plain, uri, tmp_path):
    tags = run_of(uri, id_in(plain)).data.tags
    found = write_report(shutil.copytree(plain, tmp_path / "run"))
    seen = [f"{name}: {warning}" for name, warning in found.items()]
    assert tags["align.warnings"] == ("; ".join(seen) or "nothing")
    run = begin(run_folder(tmp_path), "", trackers=["tensorboard"], sends=False)
    told = []
    for warnings in ({"KL at 0": "It is 0.", "length": "Long ones win."}, {}):
        record_warnings(run, warnings)
        told.append(RunRecord.find(run_folder(tmp_path)).facts.tags["align.warnings"])
    run.finish("FINISHED")
    assert told == ["KL at 0: It is 0.; length: Long ones win.", "nothing"]
