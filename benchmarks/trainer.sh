#!/usr/bin/env bash
# Rows of trainer.py, one GPU for each list: trainer.sh OUT TRL_ROWS OUR_ROWS [FURTHER ARGUMENTS]. Results in OUT/trl.jsonl and OUT/ours.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 trl=$2 ours=$3
shift 3
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}workload:operator:cli:tests/trainer:benchmarks VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1
CUDA_VISIBLE_DEVICES=0 python3 benchmarks/trainer.py --rows "$trl" --output "$out/trl.jsonl" "$@" >"$out/trl.log" 2>&1 &
CUDA_VISIBLE_DEVICES=1 python3 benchmarks/trainer.py --rows "$ours" --output "$out/ours.jsonl" "$@" >"$out/ours.log" 2>&1 &
wait
grep -A40 FAILED "$out"/*.log || true
for file in "$out/trl.jsonl" "$out/ours.jsonl"; do cat "$file" 2>/dev/null || true; done >"$out/trainer.jsonl"
python3 benchmarks/trainer.py --summary "$out/trainer.jsonl"
