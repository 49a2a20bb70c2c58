#!/usr/bin/env bash
# Writes a bill of materials (CycloneDX JSON) of each image's lock: `sbom.sh [FOLDER, dist/ by default] [ARGUMENTS]`.
# ARGUMENTS are passed to cyclonedx-py.
# The same locks give the same bytes: no time, no serial number. The Makefile sets the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist}
shift || true
mkdir -p "$out"
for lock in operator cpu gpu; do
  cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml --of JSON "$@" \
    -o "$out/sbom-$lock.cdx.json" "requirements/$lock.txt"
  echo "$out/sbom-$lock.cdx.json"
done
