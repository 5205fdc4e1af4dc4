#!/usr/bin/env bash
# From a fresh checkout to a finished PPO run on the bundled task, on CPUs or GPUs.
#
#   bash jobs/quickstart.sh                                      the whole run
#   bash jobs/quickstart.sh trainer.total_training_steps=2       any setting can be changed
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # a run starts a dozen processes: cached bytecode halves that
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash jobs/install.sh
export PATH="$PWD/.venv/bin:$PATH" TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}"
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1

export RLFUSE_STARTED_AT=$(date +%s) # the summary's seconds count from here, the warm start included
echo "[quickstart] preparing the model and the data"
python -m rlfuse.cli prepare
echo "[quickstart] training"
exec python -m rlfuse.train experiment=quickstart "$@"
