#!/usr/bin/env bash
# From a fresh checkout to a model that learned to look at images: GRPO, in minutes on two cores.
#
#   bash jobs/images.sh                                          the whole run
#   bash jobs/images.sh trainer.total_training_steps=2           any setting can be changed
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

echo "[images] making images, questions and the model to start from"
rlfuse prepare images
echo "[images] training"
exec rlfuse train experiment=images "$@"
