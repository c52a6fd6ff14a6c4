#!/usr/bin/env bash
# One command and one check for each thing that align promises, on the data of its demo.
#   tests/tour.sh [FOLDER]     python and align are those of the PATH; ten minutes on two cores
# A line of the tour says what holds; of a check that fails the command's words stand above its line.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mkdir -p "${1:-$(mktemp -d)}" && cd "${1:-$_}" && pwd)
cd "$folder" || exit 2
export ALIGN_HOME=$folder/home OMP_NUM_THREADS=1 WANDB_MODE=offline WANDB_SILENT=true COLUMNS=100
unset ALIGN_MODEL MLFLOW_TRACKING_URI
seen=0 unseen=0
began=$SECONDS

align() { python -m align "$@"; }
ranks() { python -m torch.distributed.run --standalone --nproc-per-node 2 -m align "$@"; }
py() { python -c "$@"; }
quiet() { align "$@" --no-mlflow; }
end_of() { "${@:2}" > said 2>&1; local code=$?; [ $code = "$1" ] || { cat said; echo "exit code $code, not $1"; return 1; }; }
refused() { "${@:2}" > said 2>&1; [[ $? =~ ^[2-5]$ ]] || { cat said; return 1; }; for name in $1; do grep -qF -- "$name" said || { cat said; echo "names no $name"; return 1; }; done; }
root() { py "import json, sys; print(json.load(open(sys.argv[1] + '/manifest.json'))['root'])" "$1"; }
same_root() { [ "$(root "$1")" = "$(root "$2")" ]; }
said() { grep -qE -- "$1" said; }
see() { # see WORDS COMMAND…: the command ends well
    local words=$1; shift
    if "$@" > said.of 2>&1; then seen=$((seen + 1)); printf '%4d s  %s\n' $((SECONDS - began)) "$words"
    else tail -25 said.of; unseen=$((unseen + 1)); printf '%4d s  NOT SEEN: %s\n' $((SECONDS - began)) "$words"; fi
}
weights() { py "
import sys
from safetensors.torch import load_file
one, other = (load_file(f'{name}/model/model.safetensors') for name in sys.argv[1:3])
worst = max((one[name].double() - other[name].double()).abs().max().item() for name in one)
assert one.keys() == other.keys() and worst <= float(sys.argv[3]), worst" "$1" "$2" "${3:-0}"; }

# --- data ---
make_world() {
    align tiny-world world --rows 240 && py "
import json
import polars as pl
rows = pl.read_parquet('world/data/paired.parquet').to_dicts()
with open('scored.jsonl', 'w') as file:
    for number, row in enumerate(rows[:120]):
        row = {'prompt': row['prompt'], 'completions': [row['chosen'], row['rejected']],
               'scores': [1.0, number % 3 / 4]}
        file.write(json.dumps(row) + '\n')
with open('first.jsonl', 'w') as first, open('all.jsonl', 'w') as every:
    for number, row in enumerate(rows):
        every.write(json.dumps(row) + '\n')
        if number < 160:
            first.write(json.dumps(row) + '\n')
with open('flawed.jsonl', 'w') as file:
    for row in [*rows[:40], {'prompt': '', 'chosen': 'a', 'rejected': 'b'}, {'prompt': 'a', 'chosen': None, 'rejected': 'b'}]:
        file.write(json.dumps(row) + '\n')
with open('grades.py', 'w') as file:
    file.write('def grade(prompt, completion, row):\n    return len(set(completion)) % 7\n')"
}
MODEL=(--model world/model)
see "a tiny world" make_world
P=world/data/paired.parquet

# --- stage 1 ---
see "check shows data as the model reads them" bash -c "python -m align check $P --model world/model | grep -qi prompt"
see "precompute-ref writes shards" quiet precompute-ref all.jsonl "${MODEL[@]}" --output cache --shards 4 --token-logps
again() { end_of 0 quiet precompute-ref all.jsonl "${MODEL[@]}" --output cache --shards 4 --token-logps && said "complete|already|nothing"; }
see "asked again it is complete" again
parts() { quiet precompute-ref all.jsonl "${MODEL[@]}" --output parts --shards 4 --token-logps --set cache.reuse_known=false --part 2/2 &&
    quiet precompute-ref all.jsonl "${MODEL[@]}" --output parts --shards 4 --token-logps --set cache.reuse_known=false --part 1/2 && same_root cache parts; }
see "two parts give the same cache" parts
of_ranks() { ranks precompute-ref all.jsonl "${MODEL[@]}" --output ranks --shards 4 --token-logps --set cache.reuse_known=false --no-mlflow && same_root cache ranks; }
see "two ranks give the same cache" of_ranks
of_ray() { quiet precompute-ref all.jsonl "${MODEL[@]}" --output ray --shards 4 --token-logps --set cache.reuse_known=false --executor ray --ray-workers 2 && same_root cache ray; }
see "Ray gives the same cache" of_ray
killed() {
    align precompute-ref all.jsonl "${MODEL[@]}" --output killed --shards 16 --set cache.reuse_known=false --set scoring.tokens_per_batch=512 --no-mlflow > killed.said 2>&1 &
    local pid=$!
    for _ in $(seq 600); do [ -n "$(ls killed/data 2>/dev/null)" ] && break; kill -0 $pid 2>/dev/null || break; sleep 0.1; done
    kill -9 $pid 2>/dev/null; wait $pid 2>/dev/null
    quiet precompute-ref all.jsonl "${MODEL[@]}" --output killed --shards 16 --set cache.reuse_known=false --set scoring.tokens_per_batch=512 &&
    quiet precompute-ref all.jsonl "${MODEL[@]}" --output whole --shards 16 --set cache.reuse_known=false --set scoring.tokens_per_batch=512 && same_root killed whole
}
see "killed and run again: the same cache" killed
grown() { quiet precompute-ref first.jsonl "${MODEL[@]}" --output first --kl-pairs 0 --set cache.reuse_known=false > /dev/null 2>&1 &&
    end_of 0 quiet precompute-ref all.jsonl "${MODEL[@]}" --output more --kl-pairs 0 --set cache.reuse_known=false --reuse first && said "reused [1-9]"; }
see "grown data: only what is new is scored" grown
see "another length is refused by name" refused "max_length" quiet precompute-ref all.jsonl "${MODEL[@]}" --output cache --shards 4 --token-logps --max-length 64
flawed() { end_of 3 quiet precompute-ref flawed.jsonl "${MODEL[@]}" --output flawed && quiet precompute-ref flawed.jsonl "${MODEL[@]}" --output flawed --max-bad-frac 0.2 && align inspect flawed --rejected > said && said 40; }
see "bad rows end stage 1, or are rejected and listed" flawed
see "verify: digests and re-scored rows" align verify cache
rotten() { cp -r first rotten && py "
import pathlib
path = sorted(pathlib.Path('rotten/data').iterdir())[0]
held = bytearray(path.read_bytes()); held[len(held) // 2] ^= 1; path.write_bytes(held)" && ! align verify rotten > said 2>&1 && said data/; }
see "a flipped byte of a shard is noticed" rotten
see "inspect" bash -c "python -m align inspect cache --json | python -m json.tool"
see "export for TRL" align export cache --output trl.parquet
see "import-ref" quiet import-ref all.jsonl "${MODEL[@]}" --logps trl.parquet --output imported

# --- refusals of honest mistakes ---
see "refused: a missing file" refused "missing.parquet" quiet precompute-ref missing.parquet "${MODEL[@]}"
see "refused: a wrong column" refused "nowhere" quiet precompute-ref $P "${MODEL[@]}" --map prompt=nowhere
see "refused: an unknown setting" refused "cache.kl_pair" quiet precompute-ref $P "${MODEL[@]}" --set cache.kl_pair=1
see "refused: an unknown method" refused "kt" align train --method kt
see "refused: an unknown option of a method" refused "gamma" quiet train --method dpo --cache cache --set method.gamma=1
pickled() { cp -r world/model pickled && rm pickled/*.safetensors && py "import torch; torch.save({}, 'pickled/pytorch_model.bin')" && refused save_pretrained quiet precompute-ref $P --model pickled --output p; }
see "refused: weights as a pickle" pickled
other_policy() { align tiny-world other --rows 8 --seed 1 > said.o && refused "other_reference" quiet train --method dpo --cache cache --model other/model --output o; }
see "refused: a policy that is not the reference" other_policy

# --- training ---
T=(--lr 1e-3 --batch-size 16 --max-steps 4)
see "KTO, with a report" quiet train --method kto --cache cache --output kto --eval-fraction 0.2 "${T[@]}" --set train.row_margins=true
see "the trained folder is one of Hugging Face" py "
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained('kto/model'); AutoModelForCausalLM.from_pretrained('kto/model')"
see "one page of the run" grep -q svg kto/report.html
see "a margin for each row and visit" bash -c "ls kto | grep -q rows"
see "answers before and after" bash -c "python -m align report kto --answers 2 --answer-tokens 8"
micro() { quiet train --method kto --cache cache --output micro --eval-fraction 0.2 "${T[@]}" --tokens-per-batch 256 && weights kto micro 1e-4; }
see "the same weights for another micro-batch" micro
two() { ranks train --method kto --cache cache --output two --eval-fraction 0.2 "${T[@]}" --no-mlflow --deepspeed zero2 && weights kto two 1e-4; }
see "the same weights on two ranks, ZeRO-2" two
three() { ranks train --method kto --cache cache --output three --eval-fraction 0.2 "${T[@]}" --no-mlflow --deepspeed zero3 && weights kto three 1e-4; }
see "the same weights under ZeRO-3" three
resumed() {
    quiet train --method dpo --cache cache --output straight "${T[@]}" --max-steps 8 || return 1
    align train --method dpo --cache cache --output stopped "${T[@]}" --max-steps 8 --save-every 2 --no-mlflow > said 2>&1 &
    local pid=$!
    for _ in $(seq 600); do ls stopped/checkpoints 2>/dev/null | grep -q step && break; kill -0 $pid 2>/dev/null || break; sleep 0.05; done
    kill -9 $pid 2>/dev/null; wait $pid 2>/dev/null
    quiet train --method dpo --cache cache --output stopped "${T[@]}" --max-steps 8 --save-every 2 --resume auto && weights straight stopped
}
see "killed and resumed: equal bits" resumed
moved() { ranks train --method dpo --cache cache --output moved "${T[@]}" --max-steps 8 --save-every 2 --deepspeed zero1 --no-mlflow --set train.max_time=1s &&
    quiet train --method dpo --cache cache --output moved "${T[@]}" --max-steps 8 --save-every 2 --deepspeed zero1 --resume auto; }
see "begun on two ranks, resumed on one" moved
see "offload to the CPU" quiet train --method dpo --cache cache --output offload "${T[@]}" --max-steps 1 --deepspeed zero2-offload
see "LoRA, merged" quiet train --method dpo --cache cache --output lora --lora --set lora.merge=true "${T[@]}"
continued() {
    quiet precompute-ref all.jsonl "${MODEL[@]}" --adapter lora/model --output adapted &&
        quiet train --method dpo --cache adapted --output continued "${T[@]}" && [ -f continued/model/adapter_model.safetensors ]
}
see "an adapter, continued" continued
see "QLoRA" quiet train --method dpo --cache cache --output qlora --lora --quantize nf4 "${T[@]}" --max-steps 1
see "file weights and shares of labels" quiet train --method kto --cache cache --output shares "${T[@]}" --max-steps 1 --set train.desirable_share=0.5 --set 'train.file_weights={all.jsonl: 0.5}'
see "a mixture of methods" quiet train --method dpo:0.8+sft:0.2 --cache cache --output mixture "${T[@]}" --max-steps 1
see "humanline" quiet train --method dpo --cache cache --output humanline "${T[@]}" --max-steps 1 --set method.humanline=true
see "mean ratios" quiet train --method kto --cache cache --output mean "${T[@]}" --max-steps 1 --set method.mean_ratios=true
all_methods() {
    quiet precompute-ref scored.jsonl "${MODEL[@]}" --output scored --token-logps || return 1
    local names; names=$(align methods --json | py "import json, sys; print(*(f'--method {m[\"name\"]}' for m in json.load(sys.stdin)))")
    [ "$(wc -w <<< "$names")" = 66 ] || { echo "$names"; return 1; }
    # shellcheck disable=SC2086
    align sweep $names --cache scored --output every --set train.max_steps=1 --set train.batch_size=8 --set tracking.mlflow=false
}
see "all 33 methods, in one sweep with its page" all_methods
see "diff of two runs, with intervals" align diff kto micro
see "evaluate: the run's own numbers, and another model's" bash -c "python -m align evaluate kto && python -m align evaluate world/model --cache cache --method dpo && test -s align-evaluation/rows.csv"
see "plan" bash -c "python -m align plan --method kto --cache cache --gpu 24g | grep -qi gib"
see "memory: settings are chosen to fit" quiet train --method dpo --cache cache --output fits "${T[@]}" --max-steps 1 --set train.memory=2g

# --- trackers ---
see "MLflow, and a version in its registry" bash -c "python -m align train --method dpo --cache cache --output tracked --lr 1e-3 --max-steps 2 && test -f mlflow.db && python -m align register tracked tour --alias champion"
see "mlflow-sync" align mlflow-sync tracked
down() { end_of 0 env MLFLOW_HTTP_REQUEST_MAX_RETRIES=0 python -m align train --method dpo --cache cache --output down "${T[@]}" --max-steps 1 --set tracking.uri=http://127.0.0.1:9 && said MLflow; }
see "a tracker that is down costs a warning" down
see "TensorBoard and W&B" bash -c "python -m align train --method dpo --cache cache --output boards --lr 1e-3 --max-steps 1 --track tensorboard,wandb && find boards -name 'events.*' | grep -q . && find . -name '*.wandb' | grep -q ."

# --- rounds and what they are made of ---
see "sample" quiet sample $P "${MODEL[@]}" --max-new-tokens 8 -n 2 --output samples --set data.split= --set sample.seed=1
paid() { end_of 0 quiet sample $P "${MODEL[@]}" --max-new-tokens 8 -n 2 --output samples --set sample.seed=1; }
see "sampled again: nothing is drawn" paid
see "judge in both orders" quiet judge samples --by pairwise --model world/model --set judge.max_new_tokens=4 --output compared
see "judge by a function" quiet judge samples --by function --function grades:grade --output judged
see "a judge's calibration" quiet judge --calibrate first.jsonl --by function --function grades:grade
see "select" align select judged --rows best_worst --keep-cut --output selected
reward() { quiet train --method reward --cache cache --output reward "${T[@]}" && quiet score $P --reward-model reward/model --output rewards; }
see "a reward model, and scores by it" reward
rounds() {
    printf '%s\n' 'model: {path: world/model}' 'data: {files: [world/data/paired.parquet]}' 'cache: {kl_pairs: 0}' 'sample: {n: 2, max_new_tokens: 8}' \
        'judge: {by: function, function: "grades:grade"}' 'select: {keep_cut: true}' 'train: {method: dpo, lr: 1.0e-3, batch_size: 4, max_steps: 1}' \
        'tracking: {mlflow: false}' 'rounds: {count: 2, prompts_per_round: 8, eval_fraction: 0.2, output: out}' > rounds.yaml
    align rounds rounds.yaml
}
see "two rounds" rounds

# --- elsewhere ---
bucket() { python - <<'PY'
import os, subprocess, sys
import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
os.environ |= keys
client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret")
client.create_bucket(Bucket="bucket")
client.upload_file("all.jsonl", "bucket", "all.jsonl")
for name in os.listdir("world/model"):
    client.upload_file(f"world/model/{name}", "bucket", f"model/{name}")
train = ("train", "--method", "kto", "--cache", "s3://bucket/cache", "--output", "s3://bucket/run", "--max-steps", "2", "--set", "train.save_every=1")
for words in (("precompute-ref", "s3://bucket/all.jsonl", "--model", "s3://bucket/model", "--output", "s3://bucket/cache"), train, (*train, "--resume", "auto")):
    subprocess.run([sys.executable, "-m", "align", *words, "--no-mlflow"], check=True)
held = {one["Key"] for one in client.list_objects_v2(Bucket="bucket")["Contents"]}
assert {"cache/manifest.json", "run/metrics.jsonl", "run/model/model.safetensors"} <= held, held
server.stop()
PY
}
see "both stages from and to a bucket, resumed there" bucket
private() { [ "$(stat -c %a home/remote)" = 700 ]; }
see "copies of a bucket are their owner's alone" private
plain() { head -8 all.jsonl > eight.jsonl && python "$here/examples/kto_step.py" world/model eight.jsonl --steps 1; }
see "a KTO step in plain PyTorch" plain
see "secrets are masked" bash -c "python -m align config --set tracking.uri=https://me:hunter2@host | grep -v hunter2 | grep -q tracking.uri"
echo "$seen seen, $unseen not, in $((SECONDS - began)) s, in $folder"
exit $((unseen > 0))
