#!/usr/bin/env bash
# Packs verl and ms-swift, and what they need beside vLLM, torch and transformers, for a GPU machine with Python 3.12 and no network.
#   pack.sh DEST    writes DEST/.gpufield0/part, .gpufield1/part ... of at most 44 MB, of the folders verl/ and swift/
# There: cat .gpufield*/part | xz -dT0 | tar -x -C FOLDER, then `--path verl=FOLDER/verl --path ms-swift=FOLDER/swift`.
set -euo pipefail
DEST=$(realpath "$1"); W=$(mktemp -d); cd "$W"
PLATFORMS=$(printf -- '--platform %s ' manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64)
install() { # FOLDER REQUIREMENT...
  local folder=$1; shift
  python3 -m pip install -q --no-deps --no-compile --target "$folder" --python-version 3.12 --implementation cp $PLATFORMS --only-binary=:all: "$@"
}
install verl verl==0.9.1 ray==2.60.0 TransferQueue==0.1.11 tensordict==0.10.0 torchdata==0.11.0 codetiming==1.4.0 dill hydra-core==1.3.8 \
  omegaconf==2.4.0 pylatexenc==2.11 pyvers orjson cachetools wandb sentry-sdk platformdirs gitpython gitdb smmap
python3 -m pip install -q --no-deps --no-compile --target verl antlr4-python3-runtime==4.9.3  # a source archive of pure Python
install swift ms-swift==4.6.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4 modelscope==1.40.2 addict attrdict binpacking dacite json_repair \
  zstandard sortedcontainers simplejson dill multiprocess
for p in rouge jieba nltk oss2 cpm_kernels transformers_stream_generator; do
  python3 -m pip install -q --no-deps --no-compile --target swift "$p" || echo "without $p"
done
rm -rf verl/ray/{dashboard/client,jars,cpp,rllib} verl/{tests,scripts,recipe,tutorial} swift/{tests,scripts}
find . -name __pycache__ -prune -exec rm -rf {} +
tar -c verl swift | xz -T2 -6 | split -b 44M -d - part.
for f in part.*; do mkdir -p "$DEST/.gpufield$((10#${f#*.}))" && cp "$f" "$DEST/.gpufield$((10#${f#*.}))/part"; done
ls -la "$DEST"/.gpufield*/part; du -sh verl/* swift/* | sort -h | tail -8
rm -rf "$W"
