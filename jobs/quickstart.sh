#!/usr/bin/env bash
# From a fresh checkout to a finished PPO run on the bundled task, on CPUs or GPUs.
#
#   bash jobs/quickstart.sh                                      the whole run
#   bash jobs/quickstart.sh trainer.total_training_steps=2       any setting can be changed
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

echo "[quickstart] preparing the model and the data"
rlfuse prepare quickstart
echo "[quickstart] training"
exec rlfuse train experiment=quickstart "$@"
