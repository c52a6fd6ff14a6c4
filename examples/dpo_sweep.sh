#!/usr/bin/env bash
# A search over beta and learning rate that pays for the reference once.
#
#   examples/dpo_sweep.sh MODEL DATA [flags of align sweep]
#
# DATA has the columns prompt, chosen, rejected (examples/data/paired.jsonl), or scores.
set -euo pipefail
model=$1 data=$2
shift 2

# DPO needs no mismatched completions: half of the work.
align precompute-ref "$data" --model "$model" --kl-pairs 0 --output dpo-cache

align sweep --method dpo --beta 0.05,0.1 --lr 5e-7,1e-6 \
    --cache dpo-cache --output dpo-sweep \
    --eval-fraction 0.05 --resume auto "$@"
