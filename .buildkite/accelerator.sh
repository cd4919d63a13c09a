#!/usr/bin/env bash
# Runs the tests of one accelerator, with the torch build that the machine already has.
#   .buildkite/accelerator.sh cuda|npu [LEVEL]
set -euo pipefail
cd "$(dirname "$0")/.."
platform=$1
level=${2:-core_model}
python3 -m pip install --quiet --editable ".[$platform,dev]"
exec python3 -m pytest tests -m "$platform" --run-level "$level"
