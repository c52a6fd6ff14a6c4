"""What each command refuses: its words, the exit code, and what the message has to name.

Every command is given in a folder of files that are right or wrong in one way each (`desk`).
"""

import json
import shlex
import shutil
import sys

import pytest

from support.command import refusal

DEEP = "/".join(["a-folder"] * 16)
# Words that a command begins with; of the others, the exit code and names in the message.
TABLE = {
    "precompute-ref --no-mlflow --output out": {
        "pairs.parquet": "2 --model ALIGN_MODEL align.yaml",
        "--model model": "2 files",
        "typos.jsonl --model model": "2 typos.jsonl 'promt' --map prompt= 'chosen_text'",
        "unscored.jsonl --model model": "2 unscored.jsonl --map scores= score",
        "pair.jsonl --model model --map prompt=promtp": "2 promtp 'prompt' --map",
        "pair.jsonl --model model --map prompt": "2 --map prompt:",
        "pair.jsonl --model model --map chosn=chosen": "2 'chosn' 'chosen' --map",
        "nope.parquet --model model": "2 nope.parquet",
        f"{DEEP}/nope.parquet --model model": f"2 {DEEP}/nope.parquet",
        "cut.parquet --model model": "2 cut.parquet",
        "broken.parquet --model model": "3 broken.parquet",
        "pairs.parquet --model bare": "2 bare model.safetensors",
        "pairs.parquet --model no-config": "2 no-config config.json",
        "pairs.parquet --model HuggingFaceTB/SmolLM2-135M-Instruct": (
            "2 hf://HuggingFaceTB/SmolLM2-135M-Instruct HF_HUB_OFFLINE"
        ),
        "chats.parquet --model no-template": "2 no-template tokens.chat_template",
        "pairs.parquet --model wordless": "2 wordless tokenizer",
        "pairs.parquet --model /nowhere": "2 /nowhere model",
        "pairs.parquet --model model --output photos": "2 photos me.jpg",
        "pairs.parquet --model model --output notes": "2 notes folder",
        "pairs.parquet --set train.lr=1": "2 train.lr train`",
        "pairs.parquet --model model --no-scored --token-logps": "2 cache.token_logps cache.scored",
        "pairs.parquet --model model --no-scored --reuse cache": "2 cache.reuse cache.scored",
        "pairs.parquet --model model --executor ray --part 1/2": "2 --executor",
        "pairs.parquet --model model --set scoring.ray_workers=some": "2 scoring.ray_workers some",
    },
    "check": {
        "cells.jsonl": "3 --max-bad-frac 3",
        "cells.jsonl --model model": "3 --max-bad-frac 3",
        "pair.jsonl --model empty": "2 empty config.json",
        "pair.jsonl --model owner/name": "2 hf://owner/name HF_HUB_OFFLINE",
        "pair.jsonl --model photos/name": "2 hf://photos/name HF_HUB_OFFLINE",
    },
    "plan --method dpo": {
        "": "2 align-cache --cache --rows",
        "--cache half": "2 half --rows",
    },
    "run rows.jsonl --model plain": {
        "": "2 --method",
        "--method dp": "2 'dp' 'dpo'",
        "--method kto --beta -1": "2 method.beta -1",
        "--method kto --kl-pairs 0": "2 kto --kl-pairs 1",
        "--method grpo": "2 grpo --token-logps",
        "--method dpo --max-time 90": "2 train.max_time 90",
        "--method dpo --policy none": "2 none model",
        "--method dpo --set train.cache=x": "2 train.cache --cache",
        "--method dpo --set judge.by=regex": "2 judge.by run`",
    },
    # Each is refused before the ranks meet.
    "train --cache cache --method dpo": {
        "--method dp": "2 'dp' 'dpo'",
        "--beta -1": "2 dpo method.beta -1",
        "--beta [": "2 --beta [:",
        "--method kto --desirable-weight much": "2 method.desirable_weight much",
        "--method orpo --beta 0.1": "2 orpo 'method.beta'",
        "--max-time 90": "2 train.max_time 90",
        "--eval-fraction 0.1 --set train.eval_cache=x": "2 train.eval_cache train.eval_fraction",
        "--lora --set lora.dropout=0.3": "2 lora.dropout 0.3 train.dropout",
        "--method sft --set train.row_margins=true": "2 train.row_margins sft",
        "--method sft --set train.desirable_share=0.5": "2 train.desirable_share sft",
        "--method grpo --set train.row_margins=true": "2 train.row_margins grpo",
        "--method kto --set train.label_threshold=.inf": "2 train.label_threshold inf",
        "--method csft --set method.good_token=x --set method.bad_token=x": (
            "2 method.good_token method.bad_token"
        ),
        "--method kto+csft": "2 csft",
        "--method grpo": "2 grpo precompute-ref --token-logps --output",
        "--track mlflow,nothing": "2 'nothing' mlflow",
        "--track mlflow --no-mlflow": "2 tracking.trackers tracking.mlflow",
        # Nothing is wrong with the flags.
        "--method kto --beta 0.1 --desirable-weight auto --cache nowhere": (
            "2 nowhere precompute-ref"
        ),
        "--cache half": "2 half manifest.json precompute-ref",
        "--cache chat-cach": "2 chat-cach precompute-ref",
        "--model /nowhere": "2 /nowhere",
        "--model bare": "2 bare model.safetensors",
        # Their ds.json is another one than that of the folder where the command is given.
        "--config torn/align.yaml": "2 torn/ds.json JSON",
        "--config seven/align.yaml": "2 train_batch_size 7 64 train.batch_size",
        "--deepspeed zero33": "2 zero33 'zero3'",
    },
    "train --cache cache --method dpo --set": {
        "method.bta=0.1": "2 'method.bta' 'beta'",
        "method.beta=.nan": "2 method.beta nan",
        "model.path=other": "2 model.path --model train.other_reference=true",
        "data.carry=[a]": "2 data.carry precompute-ref",
        "lora.merge=true": "2 lora.merge --lora",
        "lora.quantize=nf4": "2 lora.quantize --lora",
        "train.schedule=constant --set train.min_lr=0.1": "2 train.min_lr 0.1 train.schedule",
        "train.eval_text=true": "2 train.eval_text train.eval_fraction train.eval_cache",
        "train.best=-eval/loss": "2 train.best train.eval_fraction train.eval_cache",
        "train.patience=2": "2 train.patience train.best",
        "train.write_best=true": "2 train.write_best train.best",
        "train.patience=2 --set train.best=grad_norm": "2 train.patience train.best eval/loss",
        "train.best=eval/loss --set train.write_best=true --eval-fraction 0.1 "
        "--eval-every 4 --save-every 3": (
            "2 train.write_best train.eval_every 4 train.save_every 3"
        ),
        "train.desirable_share=0.5": "2 train.desirable_share kto",
        "train.checkpoint_offload=true": "2 train.checkpoint_offload train.gradient_checkpointing",
        "train.optimizer=lion": "2 train.optimizer lion",
        "method.ld_alpha=0.5": "2 dpo precompute-ref --token-logps --output",
    },
    "train --no-mlflow --max-steps 1 --cache": {
        "cache": "2 --method",
        "labels --method dpo": "2 unpaired kto",
        "labels --method kto": "2 --kl-pairs 1",
    },
    "train --no-mlflow --max-steps 1 --cache cache --method dpo": {
        "--set 'train.file_weights={third: 2}'": "2 third paired.parquet",
        "--output photos": "2 photos me.jpg",
        "--lora --set lora.quantize=nf4 --deepspeed zero3": "2 lora.quantize zero2",
        "--set train.optimizer_dtype=bfloat16": "2 train.optimizer_dtype float32",
        "--set tokens.max_length=64": "4 tokens.max_length: 2048 64",
        "--set tokens.prompt_side=right": "4 tokens.prompt_side: left right",
        "--config eos/align.yaml": "4 tokens.eos: never",
        "--set tokens.chat_template=own.jinja": "4 tokenizer.chat_template:",
    },
    "sweep --method dpo --cache cache --output out": {
        "--set train.output=x": "2 --set train.output",
        "--set train.method=kto": "2 train.method --method",
        "--lr 1e-6,1e-5 --set train.lr=1": "2 train.lr --vary",
        "--method dpoo": "2 'dpoo' 'dpo'",
        "--vary scoring.executor=ray,inline": "2 --vary scoring.executor sweep` precompute-ref",
        "--vary model.path=a,b": "2 --vary model.path --model",
        "--vary method.beta=0.1,-1": "2 dpo--1 method.beta",
        "--vary train.lr=1e-6,fast": "2 dpo-fast train.lr",
        "--vary method.beta=0.1,0.10": "2 dpo-0.1 dpo-0.10",
        "--epochs=x": "2 --epochs train.epochs",
        "--epochs=1,x --cache nowhere": "2 dpo-1 nowhere",
        "--lr=x,1": "2 dpo-x train.lr",
        "--beta=-1": "2 dpo--1 method.beta",
    },
    "score --no-mlflow --output out": {
        "pairs.parquet": "2 --reward-model",
        "train.parquet test.parquet --reward-model reward": "2 (train), test.parquet (test)",
        "pairs.parquet --reward-model model": "2 model config.json LlamaForCausalLM",
        "long.parquet --reward-model reward": "2 long.parquet",
        "nowhere.jsonl --reward-model nowhere --output no/scores": "2 no/scores",
        "x.jsonl --set model.path=other": "2 model.path --reward-model",
    },
    "sample --no-mlflow --output out": {
        "nowhere.jsonl": "2 --model",
        "nowhere.jsonl --model nowhere --set scoring.executor=ray": (
            "2 scoring.executor precompute-ref"
        ),
    },
    "judge --no-mlflow --output out": {
        "--by exact": "2 --calibrate",
        "photos --calibrate gold.jsonl --by exact": "2 --calibrate",
        "photos --by exact": "2 photos",
        "nowhere": "2 --by",
        "nowhere --by reward": "2 --reward-model",
        "nowhere --by rubric": "2 --model",
        "nowhere --by rubric --model nowhere --set scoring.executor=ray": (
            "2 scoring.executor precompute-ref"
        ),
        "nowhere --by rubric --model nowhere --template no.j2": "2 no.j2",
        "nowhere --by rubric --model nowhere --against no": "2 judge.against pairwise",
        "nowhere --by regex --pattern (": "2 judge.pattern '('",
        "nowhere --by function --function no:no": "2 judge.function",
    },
    "inspect cache": {
        "--row other.jsonl:3": "2 other.jsonl paired.parquet",
        "--row x": "2 --row x: FILE:ROW",
        "--row 999999": "2 999999",
        "--rejected --json": "2 --rejected --json",
    },
    "": {
        "verify photos": "2 photos cache",
        "inspect photos": "2 photos cache",
        "export photos": "2 photos cache",
        "methods simp": "2 'simp' 'simpo'",
        "init --method kot": "2 'kot' 'kto'",
        "config --config nowhere.yaml": "2 nowhere.yaml",
        "config --set method.betta=1": "2 method.betta beta'",
        "config --set method.betta=1 --set train.method=kto": "2 method.betta 'beta'",
    },
}
# Commands that prepare their folder before all is known.
PREPARING = ("precompute-ref", "train --no-mlflow", "score")
ROWS = [
    pytest.param(f"{command} {words}", said, id=f"{command} {words}".strip())
    for command, rows in TABLE.items()
    for words, said in rows.items()
]


def lines(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.fixture(scope="module")
def desk(course, world, reward_model, tmp_path_factory):
    """The folder whose files the commands name."""
    folder = tmp_path_factory.mktemp("desk")
    for name, target in {
        **{"cache": course.cache, "model": world.model, "reward": reward_model},
        **dict.fromkeys(("pairs.parquet", "train.parquet"), world.data.paired),
        **{"chats.parquet": world.data.paired_chat, "long.parquet": world.data.scored_long},
    }.items():
        (folder / name).symlink_to(target)
    whole = world.data.paired.read_bytes()
    (folder / "test.parquet").write_bytes(whole)
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "broken.parquet").write_bytes(whole[:100] + bytes(300) + whole[400:])
    for name, lacks in {
        "bare": ["model.safetensors"],
        "no-config": ["config.json"],
        "no-template": ["chat_template.jinja"],
        "wordless": ["tokenizer.json", "tokenizer_config.json"],
    }.items():
        shutil.copytree(world.model, folder / name, ignore=shutil.ignore_patterns(*lacks))
    shutil.copytree(course.cache, folder / "half", ignore=lambda *_: ["manifest.json"])
    for name, text in {
        "rows.jsonl": "",
        "pair.jsonl": lines({"prompt": "Why?", "chosen": " so", "rejected": " no"}),
        "typos.jsonl": lines({"promt": "a", "chosen_text": "b", "rejected": "c"}),
        "unscored.jsonl": lines(
            *({"prompt": f"Why {n}?", "completions": [" so", " no"]} for n in range(3))
        ),
        "cells.jsonl": lines(*({"prompt": n, "chosen": None, "rejected": "no"} for n in "abc")),
        "notes": "",
        "photos/me.jpg": "",
        "empty/.kept": "",
        "plain/config.json": "{}",
        "own.jinja": "{{ messages }}",
        "ds.json": "{}",
        "torn/ds.json": "{",
        "seven/ds.json": '{"train_batch_size": 7}',
        **dict.fromkeys(("torn/align.yaml", "seven/align.yaml"), "train:\n  deepspeed: ds.json\n"),
        "eos/align.yaml": "tokens:\n  eos: never\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    made = ("--model", course.model, "--output", folder / "labels", "--kl-pairs", 0, "--no-mlflow")
    course.server.success("precompute-ref", world.data.unpaired, *made)
    return folder


@pytest.mark.parametrize(("words", "said"), ROWS)
def test_a_refusal_names_what_to_change_and_makes_nothing(desk, here, monkeypatch, words, said):
    for path in desk.iterdir():
        (here / path.name).symlink_to(path)
    before = {*here.rglob("*")}
    if words.startswith("train --cache cache --method dpo"):
        monkeypatch.setitem(sys.modules, "align.pipeline.train.train", None)  # cannot be imported
    code, *names = said.split()
    refusal(int(code), *shlex.split(words), names=names)
    made = {*here.rglob("*")} - before
    if words.startswith(PREPARING):
        made = {path for path in made if path.is_file() and "_align" not in path.parts}
    assert not made
