#!/usr/bin/env bash
# The product's own commands, start to end: measure this machine, plan a small model for two local ranks under a
# memory cap that the plain layout breaks, train that plan on real text, set predicted against measured.
#
#   examples/demo.sh [FOLDER [STEPS]]     (make demo runs it with the commands of .venv on the PATH)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-demo}
steps=${2:-100}
model=examples/small-llama.json
work=(--seq 256 --batch 8 --memory-cap "${CAP:-80MiB}")

show() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
run() { show "$@"; "$@"; }

rm -rf "$folder"
mkdir -p "$folder"

# How fast are the matrix products, the memory and the links of two processes that work together here?
run loadmaster measure --ranks 2 --output "$folder/here.toml"

# Every rank holding everything, all of its sequences in one forward: does not fit (exit status 1).
plain=(loadmaster price "$model" --on "$folder/here.toml" "${work[@]}" --layout dp_replicate=2,micro_batch_size=4,precision=fp32)
show "${plain[@]}"
"${plain[@]}" || test $? -eq 1

# What does, and is fastest?
run loadmaster plan "$model" --on "$folder/here.toml" "${work[@]}" --output "$folder/plan.toml"

# Train it on the sources of this Python's standard library, read as bytes.
run loadmaster train "$folder/plan.toml" --data stdlib --steps "$steps" --lr 3e-3 --out "$folder/run"

# The same tables again, from what the run wrote; exit status 1 if the memory peak is off by more than 5 per cent.
run loadmaster compare "$folder/run" --tolerance 5
