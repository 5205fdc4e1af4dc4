#!/usr/bin/env bash
# Installs if need be, then runs the tests. Everything after the optional `unit` goes to pytest.
#
#   bash tests/run.sh               all tests
#   bash tests/run.sh unit -k keys  only tests/unit without those marked slow, only those named *keys*
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # a run starts a dozen processes: cached bytecode halves that
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash jobs/install.sh
export PATH="$PWD/.venv/bin:$PATH" TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}"
# One thread per process: several workers share the cores. Offline: tests bring their models and data along.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1

NONE_SELECTED=5

part() { # pytest on a folder; a -k that selects nothing in it is no failure
    local folder=$1 status=0
    shift
    # xdist replaces a worker that died, but then waits forever for the tests that were assigned to it.
    python -m pytest "tests/$folder" --max-worker-restart 0 "$@" || status=$?
    [ "$status" = "$NONE_SELECTED" ] || return "$status"
}

only=${1:-}
[ "$only" != unit ] || shift
failed=0
fast=()
[ "$only" != unit ] || fast=(-m "not slow")
# One process more than there are cores, as some tests wait for time to pass; at most four, as each imports all there is.
# A file at a time, in the order of unit/conftest.py. Tests that import vLLM are one group.
cores=$(env -u OMP_NUM_THREADS nproc)  # which would be the answer
part unit -n $((cores < 4 ? cores + 1 : 4)) --dist loadgroup --no-loadscope-reorder ${fast[@]+"${fast[@]}"} "$@" || failed=$?
[ "$only" = unit ] || part gpu "$@" || failed=$?  # alone: it counts the device's memory; one line where there is none
# Two files at a time, each with a Ray of its own, in the order of end_to_end/conftest.py: files with few tests are long.
# Files whose jobs share engines are one group.
[ "$only" = unit ] || part end_to_end -n 2 --dist loadgroup --no-loadscope-reorder "$@" || failed=$?
exit "$failed"
