#!/usr/bin/env bash
# Rows of staleness.py on a machine of two GPUs: staleness.sh OUT PART... All results go to OUT/staleness.jsonl. A part is
# colocate: its rows two at a time, each with a GPU and half of the cores; trl:LENGTHS:STALENESS: TRL's AsyncGRPOTrainer on both GPUs;
# or rows with commas, one after the other on both GPUs.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}.:spec:workload:operator:cli:demo:tests VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1
model=${BENCH_MODEL:-/tmp/bench-model}
[ -d "$model" ] || python3 -m benchmarks.common.models "$model" --size "${SIZE:-1.5}" --device "${DEVICE:-cuda}" --kind qwen2 --max-length 4096
rows() { # NAME CORES GPUS ROW...
  local name=$1 cores=$2 gpus=$3 flags=()
  shift 3
  for row in "$@"; do flags+=(--row "$row"); done
  CUDA_VISIBLE_DEVICES=$gpus python3 -m benchmarks.generation.staleness --cores "$cores" --size "${SIZE:-1.5}" --device "${DEVICE:-cuda}" \
    --steps "${STEPS:-6}" --timeout "${ROW_SECONDS:-170}" --model "$model" --output "$out/$name.jsonl" "${flags[@]}" >"$out/$name.log" 2>&1
}
cores=$(nproc)
half=$((cores / 2))
for part in "${@:2}"; do
  case $part in
  colocate)
    rows colocate-0 "0-$((half - 1))" 0 colocate:lognormal:0 colocate:lognormal:4 &
    rows colocate-1 "$half-$((cores - 1))" 1 colocate:lognormal:1 colocate:lognormal:2 &
    wait
    ;;
  trl:*)
    CUDA_VISIBLE_DEVICES=0,1 python3 -m benchmarks.vs_trl.async_trainer --row "server:${part#trl:}" --size "${SIZE:-1.5}" --device "${DEVICE:-cuda}" \
      --steps "${STEPS:-6}" --timeout "${ROW_SECONDS:-170}" --model "$model" --output "$out/${part//:/-}.jsonl" >>"$out/${part//:/-}.log" 2>&1
    ;;
  *)
    IFS=, read -ra list <<<"$part"
    rows "${part//[:,]/-}" "0-$((cores - 1))" 0,1 "${list[@]}"
    ;;
  esac
done
cat "$out"/*.jsonl >"$out/staleness.jsonl"
tail -n 60 "$out"/*.log
python3 -m benchmarks.generation.staleness --summary "$out/staleness.jsonl"
