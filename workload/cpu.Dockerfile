# The trainer's image for clusters without GPUs (kind, a laptop): docker build -f workload/cpu.Dockerfile -t <image> .
# It takes about 7 GB: torch brings CUDA's libraries along and does not load without them. Versions come from requirements/cpu.txt.
# BASE is any Debian or Ubuntu whose python3 is 3.11 or 3.12. The C++ compiler stays: torch and DeepSpeed compile kernels at first use.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3 python3-dev python3-venv g++ libgomp1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*

# uv and the build backend, which the image itself does not need.
FROM base AS tools
COPY requirements/uv.txt requirements/build.txt /src/requirements/
RUN python3 -m venv /opt/tools \
 && /opt/tools/bin/pip install --no-cache-dir --require-hashes -r /src/requirements/uv.txt -r /src/requirements/build.txt

FROM tools AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY operator/grpo_operator operator/grpo_operator
COPY workload/grpo_workload workload/grpo_workload
COPY cli/grpo_cli cli/grpo_cli
RUN VIRTUAL_ENV=/opt/tools /opt/tools/bin/uv build --wheel --no-build-isolation --out-dir /dist

FROM base
# Tools are mounted, not copied: nothing of them stays. --no-deps: the lock is complete, and holds what [tool.uv] in pyproject.toml
# overrides. Bytecode is compiled here, or every rank of every pod would do it again.
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=requirements/cpu.txt,target=/run/lock.txt \
    python3 -m venv --without-pip /opt/grpo \
 && /opt/tools/bin/uv pip install --python /opt/grpo --no-cache --compile-bytecode --no-deps --require-hashes -r /run/lock.txt
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=wheel,source=/dist,target=/run/dist \
    /opt/tools/bin/uv pip install --python /opt/grpo --no-cache --compile-bytecode --no-deps /run/dist/*.whl
# USER: torch and vLLM ask who they are, and the user of a pod has no entry in /etc/passwd.
ENV PATH=/opt/grpo/bin:$PATH VIRTUAL_ENV=/opt/grpo USER=grpo HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="grpo-operator workload" \
      org.opencontainers.image.description="Launcher, trainer and vLLM engine of a GRPOJob, for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /tmp
USER 65532:65532
CMD ["python", "-m", "grpo_workload.launch"]
