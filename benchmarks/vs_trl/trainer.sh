#!/usr/bin/env bash
# Rows of trainer.py, a GPU for each list of them: trainer.sh OUT ROWS [ROWS ...] [-- FURTHER ARGUMENTS]. All results in OUT/trainer.jsonl.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$1
shift
lists=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  lists+=("$1")
  shift
done
shift || true
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}.:spec:workload:operator:cli:demo:tests VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1
for gpu in "${!lists[@]}"; do
  # TRL's processes of two lists would listen on one port.
  CUDA_VISIBLE_DEVICES=$gpu MASTER_PORT=$((29500 + gpu)) python3 -m benchmarks.vs_trl.trainer --rows "${lists[gpu]}" --output "$out/gpu-$gpu.jsonl" "$@" >"$out/gpu-$gpu.log" 2>&1 &
done
wait
grep -A40 FAILED "$out"/gpu-*.log || true
cat "$out"/gpu-*.jsonl >"$out/trainer.jsonl"
python3 -m benchmarks.vs_trl.trainer --summary "$out/trainer.jsonl"
