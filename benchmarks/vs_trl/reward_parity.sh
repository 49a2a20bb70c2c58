#!/usr/bin/env bash
# reward_parity.sh OUT [KNOWN]: all curves of reward_parity.py at once, on a machine of four GPUs: three seeds of each side and topology, three runs a GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1
known=${2:-} # a file of runs that are not needed any more
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}.:spec:workload:operator:cli:demo:tests VLLM_LOGGING_LEVEL=WARNING
python3 -m grpo_demo.pretrained smollm2 --hub-cache "${HF_HUB_CACHE:?where the model goes}"
for seed in 1 2 3; do
  for run in "trl Colocate 0" "ours Colocate 1" "trl Server 2,3" "ours Server 3,2"; do
    read -r side topology gpus <<<"$run"
    grep -qs "\"side\": \"$side\", \"topology\": \"$topology\", \"seed\": $seed," "$known" && continue
    timeout "${PARITY_SECONDS:-300}" python3 -m benchmarks.vs_trl.reward_parity run --side "$side" --topology "$topology" --seed "$seed" \
      --gpus "$gpus" --output "$out/parity.jsonl" >"$out/$side-$topology-$seed.log" 2>&1 &
  done
done
wait
for log in "$out"/*-*-*.log; do tail -1 "$log"; done
