"""What a run leaves behind, read by others."""

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.schemas.rows import Role
from support.tracked_training import journalled, run_of, stored
from support.trainings import weights


@dataclass(frozen=True)
class Finished:
    """A run that is over, and the store that was told of it."""

    folder: Path
    uri: str

    @property
    def model(self):
        return self.folder / "model"

    @property
    def last(self):
        """The newest value of every metric."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {name: value for line in map(json.loads, lines) for name, value in line.items()}

    @property
    def run_id(self):
        return json.loads((self.folder / "_align" / "mlflow.json").read_text())["run_id"]

    @property
    def key(self):
        return json.loads((self.folder / "_align" / "mlflow.json").read_text())["key"]

    @property
    def card(self):
        return (self.model / "README.md").read_text()


@pytest.fixture(scope="module")
def finished(course, tmp_path_factory):
    """Gives a run with every row of the cache evaluated; each is made once."""
    runs = {}

    def run_of(*more):
        if more not in runs:
            folder = tmp_path_factory.mktemp("output")
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            runs[more] = Finished(folder / "run", uri)
            evaluated = ("--eval-fraction", 0, "--set", f"train.eval_cache={course.cache}")
            tracked = ("--mlflow", "--set", f"tracking.uri={uri}", "--eval-every", 2)
            course.run(folder / "run", *evaluated, *tracked, *more)
        return runs[more]

    return run_of


@pytest.fixture(scope="module")
def plain(finished):
    """The whole policy was trained; the checkpoint kept beside the last is the best by a metric."""
    best = ("--set", "train.best=-eval/rewards/rejected", "--keep-last", 1)
    return finished(*best)


@pytest.fixture(scope="module")
def adapted(finished):
    """An adapter was trained, and merged as well."""
    return finished("--lora", "--merge", "--set", "lora.rank=4")


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
    expected = {name: run.last[name] for name in named}
    found = {name: mean_logps(model, cache, role) for name, role in named.items()}
    return found == pytest.approx(expected, abs=1e-3)


def test_the_saved_model_is_the_policy_that_was_evaluated_last(plain, course):
    model = AutoModelForCausalLM.from_pretrained(plain.model)
    assert agrees(model, plain, course.cache)
    before = AutoModelForCausalLM.from_pretrained(course.model)
    assert not agrees(before, plain, course.cache)


def test_its_config_is_the_references_but_for_the_dtype(plain, course):
    found = json.loads((plain.model / "config.json").read_text())
    expected = json.loads((course.model / "config.json").read_text())
    assert found.pop("dtype") == "float32"
    expected.pop("dtype", None)
    assert found == expected
    assert found["attention_dropout"] == 0.1
    assert not [name for name in found if "attn_implementation" in name]


def test_its_tokenizer_is_the_references_to_the_byte(plain, course):
    names = {path.name for path in course.model.iterdir()} - {"config.json", "model.safetensors"}
    assert "tokenizer.json" in names
    for name in names:
        assert (plain.model / name).read_bytes() == (course.model / name).read_bytes()
    texts = [AutoTokenizer.from_pretrained(folder) for folder in (plain.model, course.model)]
    assert texts[0]("Why is that?")["input_ids"] == texts[1]("Why is that?")["input_ids"]


def test_its_card_tells_everything_it_came_from(plain, course):
    manifest = json.loads((course.cache / "manifest.json").read_text())
    front = yaml.safe_load(plain.card.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "tags": ["align", "kto", "preference-alignment"],
    }
    for said in (
        f"| cache root | {manifest['root']} |",
        f"| reference | {course.model} |",
        f"| reference weights | {manifest['fingerprint']['model.weights']} |",
        f"| paired.parquet | {manifest['inputs'][0]['sha256']} |",
        f"| MLflow run | {plain.run_id} |",
        "| beta | 0.1 |",
        "| train.lr | 0.001 |",
        f"| MLflow tag align.run_key | {plain.key} |",
        "| train.dtype | float32 |",
        "by `kto` for 6 steps, 24 rows seen out of 60",
        "| eval/loss | ",
        "| a turn ends with | <\\|im_end\\|> (1), as the chat template writes it |",
    ):
        assert said in plain.card


def test_its_config_file_makes_the_same_model_again(plain, course, tmp_path):
    again = ("--config", plain.folder / "config.yaml", "--output", tmp_path / "run", "--no-mlflow")
    answer = course.server.run("train", *again)
    assert answer.code == 0, answer
    assert weights(tmp_path / "run") == weights(plain.folder)


def test_mlflow_knows_every_number_of_the_metrics_file(plain):
    assert stored(plain.uri, plain.run_id) == journalled(plain.folder)
    names = {name for name, *_ in journalled(plain.folder)}
    assert {"loss", "lr", "grad_norm", "kl/raw", "speed/tokens_per_second", "eval/loss"} <= names


def test_mlflow_knows_the_settings_that_were_used(plain, course):
    params = run_of(plain.uri, plain.run_id).data.params
    assert params["model.path"] == params["train.model"] == str(course.model)
    assert (params["train.dtype"], params["train.tokens_per_batch"]) == ("float32", "2048")
    assert "train.resume" not in params


def test_mlflow_keeps_what_a_person_looks_at_where_the_run_has_it(plain):
    kept = kept_by_mlflow(plain)
    looked_at = {"report.html", "metrics.jsonl", "config.yaml", "deepspeed.json"}
    tables = {f"evaluations/step-0000000{step}.csv" for step in (0, 2, 4, 6)}
    assert set(kept) == {*looked_at, *tables, "model/README.md", "manifest.json"}
    for name in (*looked_at - {"metrics.jsonl"}, *tables, "model/README.md"):
        assert kept[name].read_bytes() == (plain.folder / name).read_bytes()


def test_a_model_is_uploaded_where_it_is_asked_for(finished):
    run = finished(
        *("--max-steps", 2, "--set", "tracking.upload_model=true"),
        *("--set", "tracking.system_metrics=true"),
    )
    names = {path.name for path in run.model.iterdir()}
    kept = kept_by_mlflow(run)
    assert {name for name in kept if name.startswith("model/")} == {f"model/{one}" for one in names}
    stored_weights = kept["model/model.safetensors"].read_bytes()
    assert stored_weights == (run.model / "model.safetensors").read_bytes()
    seen = [step for name, step, _ in journalled(run.folder) if name.startswith("system/cpu")]
    assert seen == [1, 2]


def kept_by_mlflow(run):
    """Every artifact by its name, and where it lies."""
    root = Path(run_of(run.uri, run.run_id).info.artifact_uri.removeprefix("file://"))
    return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_checkpoint_tells_what_was_measured_at_its_step(plain):
    lines = map(json.loads, (plain.folder / "metrics.jsonl").read_text().splitlines())
    at_step = {}
    for line in lines:
        at_step.setdefault(line["step"], {}).update(line)
    for path in (plain.folder / "checkpoints").glob("step-*"):
        position = json.loads((path / "align_checkpoint.json").read_text())["position"]
        known = at_step[position["global_step"]]
        assert position["metrics"] == {n: known[n] for n in known.keys() - {"step", "time"}}
        assert "eval/loss" in known


def test_the_newest_and_the_best_checkpoint_stay(plain):
    lines = map(json.loads, (plain.folder / "metrics.jsonl").read_text().splitlines())
    name = "eval/rewards/rejected"
    values = {line["step"]: line[name] for line in lines if name in line}
    best = min((2, 4, 6), key=lambda step: values[step])
    kept = sorted(int(path.name[5:]) for path in (plain.folder / "checkpoints").glob("step-*"))
    assert best != 6, "the best is another than the newest, or this shows nothing"
    assert kept == [best, 6]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_loaded_by_peft_on_its_base(adapted, course):
    model = AutoPeftModelForCausalLM.from_pretrained(adapted.model)
    assert agrees(model.eval(), adapted, course.cache)
    settings = json.loads((adapted.model / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(course.model)
    assert not list(adapted.model.glob("model*.safetensors"))
    assert "library_name: peft" in adapted.card


def test_a_merged_model_is_its_base_with_the_adapter(adapted, course):
    merged = adapted.folder / "model-merged"
    assert agrees(AutoModelForCausalLM.from_pretrained(merged), adapted, course.cache)
    assert "library_name: transformers" in (merged / "README.md").read_text()
    tensors, base = (load_file(folder / "model.safetensors") for folder in (merged, course.model))
    assert tensors.keys() == base.keys()
    changed = {name for name in base if not torch.equal(tensors[name], base[name])}
    assert changed == {name for name in base if "_proj" in name}


def test_a_run_in_bfloat16_saves_bfloat16(finished):
    run = finished("--dtype", "bfloat16", "--no-mlflow")
    assert json.loads((run.model / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(run.model / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert run.last["eval/loss"] < 0.5  # where it began


def test_a_best_metric_that_is_never_measured_is_refused_or_told(course, tmp_path):
    never = ("--set", "train.best=-eval/loss", "--eval-every")
    for given, said in (((0,), "eval_every is 0"), ((2, "--eval-fraction", 0), "no rows are held")):
        (answer,) = course.start(tmp_path / "never", *never, *given).answers()
        assert answer.code == 2
        assert said in answer.err
    misspelt = ("--set", "train.best=eval/los", "--max-steps", 1)
    answer = course.run(tmp_path / "run", *misspelt)
    assert answer.err.count("nothing called eval/los was measured. Did you mean 'eval/loss'?") == 1


def test_a_line_of_progress_counts_every_step_with_its_padding(course, tmp_path):
    answer = course.run(tmp_path / "run", "--set", "train.log_every=5", "--max-steps", 4)
    assert "training: 4 steps in" in answer.err
