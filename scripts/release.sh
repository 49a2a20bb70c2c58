#!/usr/bin/env bash
# What the release workflow runs, and anybody may run before it:
#   release.sh check VERSION    all places that name the release name this one, and CHANGELOG.md dates it
#   release.sh dist [FOLDER [ARGUMENTS]]
#                               wheel, source archive, chart, CRDs and bills of materials with their checksums, in FOLDER
#                               (dist/ by default); ARGUMENTS are passed to cyclonedx-py
# The Makefile sets the environment: `make release-check VERSION=0.1.0`, `make dist`.
set -euo pipefail
cd "$(dirname "$0")/.."

check() {
  local version=${1:?give the version, for example 0.1.0} chart=charts/grpo-operator/Chart.yaml wrong=0
  expect() { # FILE PATTERN: a line of the file has the pattern
    grep -qE "$2" "$1" || { echo "release: $1 does not say $version (no line is like $2)" >&2; wrong=1; }
  }
  expect pyproject.toml "^version = \"$version\"$"
  expect $chart "^version: $version$"
  expect $chart "^appVersion: \"?$version\"?$"
  expect operator/grpo_operator/api/names.py "workload:$version\""
  expect operator/Dockerfile "^ARG VERSION=$version$"
  expect workload/Dockerfile "^ARG VERSION=$version$"
  expect CHANGELOG.md "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$"
  return $wrong
}

dist() {
  local out=${1:-dist}
  shift || true
  mkdir -p "$out"
  "${GRPO_CACHE:-$HOME/.cache/grpo-operator}/uv/bin/uv" build -q --out-dir "$out"
  rm -f "$out/.gitignore"
  helm package charts/grpo-operator --destination "$out" >/dev/null
  cat crds/*.yaml >"$out/crds.yaml"
  scripts/sbom.sh "$out" "$@" >/dev/null
  (cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%f\n' | sort | xargs sha256sum >SHA256SUMS)
  cut -c67- "$out/SHA256SUMS"
}

case ${1:-} in
  check | dist) "$@" ;;
  *) grep '^#  ' "$0" >&2; exit 2 ;;
esac
