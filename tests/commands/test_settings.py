"""Where a setting comes from, and what a config file may not hold."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from align.pipeline.options.settings import as_absolute, as_yaml, flatten, load_settings
from align.pipeline.options.yaml_values import from_yaml
from align.pipeline.plan.memory import Budget
from align.pipeline.plan.setting_checks import require_effect, seconds_of
from align.schemas.config import Config
from align.schemas.errors import UsageError
from align.schemas.train_options import TrainOptions
from align.stages.methods.table import METHODS, objective_of
from support.command import align, refusal, success
from support.refusals import refuses

pytestmark = pytest.mark.usefixtures("here")


def load(*sets, data=(), **flags):
    return load_settings(flags, sets, file=None, data=data)


def write(text, path="align.yaml"):
    Path(path).write_text(text)


# Every other setting is empty, zero, off, auto or none by default.
DEFAULTS = """
data: {max_bad_frac: 0.001}
tokens: {max_length: 2048, prompt_side: left, eos: append, learn: assistant}
cache: {output: align-cache, kl_pairs: 1, scored: true, reuse_known: true}
scoring: {tokens_per_batch: 16384, executor: inline}
tracking: {mlflow: true, experiment: align}
train:
  {output: align-run, epochs: 1.0, batch_size: 64, lr: 1.0e-6, schedule: cosine, warmup: 0.1,
  beta1: 0.9, beta2: 0.999, epsilon: 1.0e-8, max_grad_norm: 1.0, optimizer: adamw,
  optimizer_dtype: float32, pairs_from_scores: best_worst, label_threshold: mean,
  desirable_share: 1.0, undesirable_share: 1.0, eval_table: 200, log_every: 1, save_minutes: 30.0,
  keep_last: 2, resume: never, nonfinite_limit: 3}
lora: {start: adapter, rank: 16, alpha: 32.0}
rewards: {output: align-rewards}
server: {key_variable: OPENAI_API_KEY, concurrency: 16, timeout: 120.0, retries: 8}
sample: {output: align-samples, n: 8, temperature: 1.0, top_p: 1.0, max_new_tokens: 512}
judge: {output: align-judged, answer: answer, pairs: all, max_new_tokens: 512}
select: {output: align-selected, rows: best_worst, threshold: mean}
rounds: {output: align-rounds, count: 3, reference: fixed, serve_timeout: 600.0, eval_fraction: 0.1,
  eval_n: 1}
"""
EMPTY = ("", 0, [], {}, "auto", "none")


def test_a_run_without_settings_is_of_these_defaults():
    found = {name: value for name, value in flatten(Config()).items() if value not in EMPTY}
    assert found == {
        f"{section}.{name}": value
        for section, settings in yaml.safe_load(DEFAULTS).items()
        for name, value in settings.items()
    }


@pytest.mark.parametrize("method", ["", *METHODS])
def test_the_written_file_holds_the_defaults_and_the_options_of_its_method(method):
    """Those as comments: a run with another method refuses them."""
    words = ("--method", method) if method else ()
    success("init", *words)
    refusal(2, "init", *words, names=("align.yaml",))
    assert load().config == replace(Config(), train=replace(TrainOptions(), method=method))
    assert {*load().origins} == {*flatten(Config())}
    section = Path("align.yaml").read_text().partition("\nmethod:")[2].replace("\n  # ", "\n  ")
    options = yaml.safe_load("method:" + section)["method"] or {}
    expected = objective_of(method, {}).values if method else {}
    assert options == expected
    assert not method or objective_of(method, options).values == expected


def test_a_schema_beside_the_file_knows_every_setting(here):
    success("init", "--schema")
    first, *_ = (here / "align.yaml").read_text().splitlines()
    assert first == "# yaml-language-server: $schema=align.schema.json"
    schema = json.loads((here / "align.schema.json").read_text())
    assert {one.partition(".")[0] for one in flatten(Config())} < {*schema["properties"]}
    assert load().config == Config()


def test_config_prints_every_setting_and_where_it_comes_from(monkeypatch):
    write("cache:\n  shards: 5\n  kl_pairs: 2\nmodel:\n  path: here\ndata:\n  files: [a]\n")
    monkeypatch.setenv("ALIGN_MODEL", "from-env")
    lines = align("config", "data.parquet", "--set", "cache.kl_pairs=3").out.splitlines()
    shown = dict(line.split(" = ", 1) for line in lines if not line.startswith("#"))
    assert set(shown) == set(flatten(Config()))
    for name, value, origin in (
        ("cache.shards", "5", "align.yaml"),
        ("model.path", "'from-env'", "ALIGN_MODEL"),
        ("data.files", "['data.parquet']", "flag"),
        ("cache.kl_pairs", "3", "--set"),
        ("cache.reuse", "[]", "default"),
    ):
        assert shown[name].split() == [value, f"({origin})"]
    lines = align("config", "--changed", "--set", "cache.kl_pairs=1").out.splitlines()
    changed = {line.partition(" ")[0] for line in lines if not line.startswith("#")}
    assert changed == {"cache.shards", "model.path", "data.files"}  # 1 is the default
    flag = {"model.path": "flag"}
    assert load(**flag).config.model.path == "flag"
    assert load("model.path=set", **flag).config.model.path == "set"


def test_a_time_is_in_days_hours_minutes_and_seconds():
    times = {"": math.inf, "90s": 90, "45m": 2700, "3h30m": 12_600, "1d2h3m4s": 93_784}
    assert {text: seconds_of(text) for text in times} == times


def test_a_set_value_has_the_type_of_its_setting():
    for text, value in (
        ("cache.shards=7", 7),
        ("cache.token_logps=true", True),
        ("data.max_bad_frac=1", 1.0),
        ("model.path=5", "5"),
        ("select.threshold=0.5", 0.5),
        ("train.label_threshold=median", "median"),
        ("data.map={prompt: question}", {"prompt": "question"}),
        ("data.files=[a, b]", ["a", "b"]),
        ("train.lr=1e-3", 0.001),  # YAML 1.1 alone would take it for text
    ):
        section, name = text.partition("=")[0].split(".")
        found = getattr(getattr(load(text).config, section), name)
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1e5", "0o17", "yes", "null", "010", "2026-01-31", "a: b", "1.0"])
def test_a_text_that_looks_like_something_else_is_written_so_that_it_stays_one(text):
    named = load(f"tracking.run_name={text}", "data.carry=['" + text + "']").config
    write(as_yaml(named))
    assert load().config.tracking.run_name == text
    assert load().config.data.carry == [text]


def test_caches_to_evaluate_on_are_named_by_their_folders_or_by_hand(here):
    def caches(text, *sets):
        write(f"train:\n  eval_cache: {text}\n", "sub/align.yaml")
        return load_settings({}, sets, file=Path("sub/align.yaml")).config.train.eval_caches

    (here / "sub").mkdir()
    assert caches("''") == caches("[]") == []
    assert caches("one") == caches("[one]") == [("", "sub/one")]
    assert caches("[name=one]") == [("name", "sub/one")]
    found = [("one", "sub/one"), ("b", "sub/a/two"), ("x_y.z", "s3://bucket/x y.z")]
    assert caches("[one, b=a/two, 's3://bucket/x y.z']") == found
    assert caches("[a, c]", "train.eval_cache=[x=b, ./y=c]") == [("x", "b"), ("y_c", "./y=c")]
    config = load(**{"train.eval_cache": ["a", "b=/c"]}).config
    assert as_absolute(config)["train.eval_cache"] == [str(here / "a"), "b=/c"]
    require_effect(load(**{"train.eval_cache": ["a/c", "b/d"]}))
    for twice in (["a/c", "b/c"], ["c", "c=d"]):
        with refuses(UsageError, "train.eval_cache", "c", "--eval-cache"):
            require_effect(load(**{"train.eval_cache": twice}))


def test_memory_may_be_a_number_of_bytes():
    write("train:\n  memory: 24000000000\n")
    for config in (load().config, load("train.memory=24000000000").config):
        assert Budget.of(config.train, 0).size == 24_000_000_000
    for wrong in ("0", "-5000000000", "true", "24e9"):
        write(f"train:\n  memory: {wrong}\n")
        with refuses(UsageError, "train.memory"):
            require_effect(load())


# A config file, and what the refusal names beside the file itself.
MISTAKES = {
    "cache:\n  shard: 1\n": ("'cache.shard'", "'cache.shards'"),
    "cache: 5\n": ("cache", "5"),
    "cache:\n  shards: 1.5\n": ("cache.shards", "1.5"),
    "cache:\n  shards: true\n": ("cache.shards", "True"),
    "cache:\n  shards: 1_000\n": ("cache.shards", "'1_000'"),
    "cache:\n  shards: 1:30\n": ("cache.shards", "'1:30'"),
    "lora:\n  enabled: on\n": ("lora.enabled", "'on'"),
    "train:\n  lr: true\n": ("train.lr", "True"),
    "train:\n  gradient_checkpointing: yes\n": ("train.gradient_checkpointing", "'yes'"),
    "data:\n  files: [a, 1]\n": ("data.files[1]", "1"),
    "data:\n  map: {prompt: 1}\n": ("data.map['prompt']", "1"),
    "model:\n  dtype: float33\n": ("model.dtype", "float33", "'float32'"),
    "- a\n": ("['a']",),
    "5: 1\n": ("'5'",),
    f"train:\n  seed: {1 << 63}\n": ("train.seed", "9223372036854775808"),
    f"train:\n  lr: {10**400}\n": ("train.lr", "1000"),
    f"train:\n  lr: {'9' * 5000}\n": ("YAML",),
    "train:\n  lr: 1e999\n": ("train.lr", "inf"),
    "train:\n  eval_fraction: 1.5\n": ("train.eval_fraction", "1.5"),
    "cache:\n  shards: 1\n  shards: 2\n": ("shards",),
    "cache:\n  shards: 1\ncache.shards: 2\n": ("cache.shards",),
}


@pytest.mark.parametrize(("text", "names"), MISTAKES.items(), ids=itertools.count())
def test_a_mistake_in_the_file_names_the_file_and_the_setting(text, names):
    write(text)
    refusal(2, "config", names=("align.yaml", *names))


# What is given by --set, and what the refusal names beside it.
MISTAKEN_SETS = {
    "modle.path=x": ("'modle.path'", "'model.path'"),
    "cache=4": ("cache", "4"),
    "cache.shards": ("cache.shards", "NAME=VALUE"),
    "cache.shards=": ("cache.shards", "None"),
    "cache.shards=[": ("cache.shards=[", "YAML"),
    "cache.reuse=[&a b, *a]": ("cache.reuse", "YAML"),
    "data.map={a: b, a: c}": ("data.map", "YAML"),
    "train.beta1=10": ("train.beta1", "10"),
    "train.beta2=1.0": ("train.beta2",),
    "lora.dropout=1.5": ("lora.dropout", "1.5"),
    "train.epochs=1e300": ("train.epochs",),
    f"cache.shards={2**63}": ("cache.shards", "9223372036854775808"),
}


@pytest.mark.parametrize(("text", "names"), MISTAKEN_SETS.items(), ids=MISTAKEN_SETS)
def test_a_mistake_in_a_set_names_it_and_the_nearest_name(text, names):
    refusal(2, "config", "--set", text, names=("--set", *names))


def test_a_value_is_read_as_it_looks():
    numbers = {"1e-5": 1e-5, "1.e-5": 1e-5, "+.5e1": 5.0, "5": 5, "010": 10, "0x10": 16, "0o17": 15}
    texts = ("2026-01-31", "2026-99-99", "1:30", "1_000", "yes", "on", "1e-5,2e-5", "<<", "=")
    others = {"True": True, "false": False, "~": None, "": None}
    for text, value in (numbers | dict(zip(texts, texts, strict=True)) | others).items():
        found = from_yaml(text)
        assert (found, type(found)) == (value, type(value))
    write("tokens:\n  date: 2026-01-31\n")
    assert load("tokens.max_length=8").config.tokens.date == "2026-01-31"


def test_a_home_is_that_of_its_user_in_the_file_and_the_shells_in_a_flag(monkeypatch):
    found = as_absolute(load(**{"cache.output": "~nosuchuser/x", "model.path": "~"}).config)
    assert found["cache.output"] == str(Path.cwd() / "~nosuchuser/x")
    assert found["model.path"] == str(Path.cwd() / "~")
    monkeypatch.setenv("HOME", "/home/somebody")
    write("model:\n  path: ~/m\ndata:\n  files: [~/a]\n")
    config = load().config
    assert (config.model.path, config.data.files) == ("/home/somebody/m", ["/home/somebody/a"])


def test_paths_in_the_file_are_meant_from_where_it_lies(here):
    (here / "project" / "data").mkdir(parents=True)
    write(
        "model:\n  path: m\n  adapter: /abs\ntokens:\n  chat_template: t.jinja\n"
        "cache:\n  output: out\n  reuse: [old]\ndata:\n  files: [data/a.parquet]\n"
        "judge:\n  template: j.j2\n",
        "project/align.yaml",
    )
    config = load(data=["project/a.parquet"], **{"train.output": "out"}).config
    assert config.train.output == "out"  # of a flag, from here
    assert (config.model.path, config.model.adapter) == ("project/m", "/abs")
    assert (config.tokens.chat_template, config.cache.output) == ("project/t.jinja", "project/out")
    assert config.judge.template == "project/j.j2"
    assert (config.cache.reuse, config.data.files) == (["project/old"], ["project/a.parquet"])


def test_the_file_here_comes_before_the_one_beside_the_data_or_the_cache(here):
    (here / "project").mkdir()
    write("cache:\n  shards: 1\n", "project/align.yaml")
    beside = {"train.cache": "project/cache"}
    assert load(data=["project/a.parquet"]).config.cache.shards == 1
    assert load(**beside).config.cache.shards == 1
    write("cache:\n  shards: 2\n")
    assert load(data=["project/a.parquet"]).config.cache.shards == 2
