#!/usr/bin/env bash
# Packs verl and ms-swift, and what they need beside vLLM and what it needs, for a GPU machine with Python 3.12 and no network.
#   pack.sh DEST    writes DEST/.gpufield0/part, .gpufield1/part ... of at most 44 MiB, of the folders verl/ and swift/
# There: cat .gpufield*/part | xz -dT0 | tar -x -C FOLDER, then `--path verl=FOLDER/verl --path ms-swift=FOLDER/swift`.
# Run it in the project's environment ($VIRTUAL_ENV): flash-attn's setup wants a torch to read the archive.
set -euo pipefail
DEST=$(realpath "$1"); W=$(mktemp -d); cd "$W"
PACKAGES=$("$VIRTUAL_ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python3 -m venv build && build/bin/pip install -q setuptools wheel
PLATFORMS=$(printf -- '--platform %s ' manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
wheels() { # FOLDER REQUIREMENT...
  local folder=$1; shift
  # shellcheck disable=SC2086
  build/bin/pip install -q --no-deps --no-compile --target "$folder" --python-version 3.12 --implementation cp $PLATFORMS --only-binary=:all: "$@"
}
sources() { build/bin/pip install -q --no-deps --no-compile --target "$@"; } # of pure Python
# Without the packages of Ray's dashboard, which it then does not start.
wheels verl verl==0.9.1 ray==2.60.0 TransferQueue==0.1.11 tensordict==0.10.0 torchdata==0.11.0 codetiming==1.4.0 dill==0.4.1 \
  hydra-core==1.3.8 omegaconf==2.4.0 pylatexenc==2.11 pyvers==0.2.3 orjson==3.13.0 cachetools==8.0.2 importlib-metadata==8.7.0 \
  wandb==0.31.0 sentry-sdk==2.75.0 platformdirs==4.14.8 gitpython==3.2.1 gitdb==4.0.12 smmap==5.0.3
sources verl antlr4-python3-runtime==4.9.3
# Of flash-attn, the loss in Triton that verl takes.
PYTHONPATH=$PACKAGES FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE build/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation flash-attn==2.8.3
tar -xzf flash_attn-*.tar.gz -C verl --strip-components=1 --wildcards '*/flash_attn/ops/__init__.py' '*/flash_attn/ops/triton/__init__.py' \
  '*/flash_attn/ops/triton/cross_entropy.py'
wheels swift ms-swift==4.6.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4 modelscope==1.40.2 modelscope-hub==0.5.1 addict==2.4.0 \
  attrdict==2.0.1 binpacking==2.0.1 dacite==1.9.2 json-repair==0.64.6 zstandard==0.25.0 sortedcontainers==2.4.0 simplejson==4.3.0 \
  dill==0.4.1 multiprocess==0.70.19 importlib-metadata==8.7.0 pycryptodome==4.4.0 jmespath==1.1.0
sources swift oss2==2.19.1 crcmod==1.7 aliyun-python-sdk-core==2.16.1 aliyun-python-sdk-kms==2.16.5 transformers-stream-generator==0.0.5
rm -rf verl/ray/{dashboard/client,jars,cpp,rllib} verl/{tests,scripts,recipe,tutorial,bin} swift/{tests,scripts,bin}
find verl swift -name __pycache__ -prune -exec rm -rf {} +
tar -c verl swift | xz -T2 -6 | split -b 44M -d - part.
for f in part.*; do mkdir -p "$DEST/.gpufield$((10#${f#*.}))" && cp "$f" "$DEST/.gpufield$((10#${f#*.}))/part"; done
ls -la "$DEST"/.gpufield*/part
rm -rf "$W"
