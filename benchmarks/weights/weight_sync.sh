#!/usr/bin/env bash
# Weight syncs of every topology in real jobs, on a machine of four GPUs. One JSON line for each goes to $1/weight_sync.jsonl.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$1
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}.:spec:workload:operator:cli:demo:tests VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1
failed=0
sync() {
  timeout 240 python3 -m benchmarks.weights.weight_sync "$@" >>"$out/weight_sync.jsonl" 2>"$out/last.err" || {
    echo "FAILED: $*"
    tail -60 "$out/last.err"
    failed=1
  }
}
sync --size 1.5 --topology Server --ranks 1 --zero-stage 2
sync --size 1.5 --topology NodeLocal --ranks 3 --zero-stage 2
sync --size 1.5 --topology Colocate --ranks 1 --zero-stage 2
sync --size 7 --topology Server --ranks 3 --zero-stage 3
exit "$failed"
