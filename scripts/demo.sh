#!/usr/bin/env bash
# Fine-tune the pretrained MiniLM on 2,000 labelled tweets with 2 workers. `make demo` runs this
# in its environment; by hand: bash scripts/demo.sh [RUN_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."

# 1. A run folder that is free: an earlier demo is never written over.
wanted=${1:-runs/demo}
run=$wanted
for ((n = 2; ; n++)); do
  [ -e "$run" ] || break
  run=$wanted-$n
done
[ "$run" = "$wanted" ] || echo "$wanted is there already and stays as it is; this run goes to $run"

# 2. The data as two csv files (2,000 tweets to train on, 1,000 held out), and the folder of the model.
model=$(python -m rapidformer_templates.commands.bench.demo_data runs/demo-data)
model=${model#"$PWD"/}

# 3. The black-box command, shown before it runs.
command=(
  rapidformer
  --task sequence_classification
  --pretrained-model-name-or-path "$model"
  --data-dir runs/demo-data --data-name tweets
  --seq-length 64 --epochs 1 --micro-batch-size 8
  --lr 2e-4 --lr-warmup-fraction 0.1
  --log-interval 5
  --nproc-per-node 2
  --save "$run"
)
printf '\n%s\n\n' "${command[*]}"
"${command[@]}"

printf '\ncurves          %s\nexported model  %s\n' "$run/curves.png" "$run/export/"
