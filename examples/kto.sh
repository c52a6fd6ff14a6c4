#!/usr/bin/env bash
# KTO from thumbs up and down: scores the reference once, then trains.
#
#   examples/kto.sh MODEL DATA [flags of align train]
#
# DATA has the columns prompt, completion, label (examples/data/unpaired.csv), or pairs.
set -euo pipefail
model=$1 data=$2
shift 2

align precompute-ref "$data" --model "$model" --output kto-cache

# auto: as heavy in all as the other label, however many there are of each.
align train --method kto --cache kto-cache --output kto-run \
    --lr 5e-6 --eval-fraction 0.05 \
    --desirable-weight auto --undesirable-weight auto \
    --resume auto "$@"
