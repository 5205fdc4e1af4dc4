#!/usr/bin/env bash
# PPO trains a teacher on the bundled task, then on-policy distillation trains the same initial model with the teacher's
# log-probs. The task's rule scores the student in validation only.
#
#   bash jobs/distill.sh                              both parts
#   bash jobs/distill.sh actor.optim.lr=3e-4          settings of the last part can be changed
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

name=distill-$(date +%m%d-%H%M%S)
echo "[distill] preparing the model and the data"
rlfuse prepare quickstart
echo "[distill] training the teacher"
rlfuse train experiment=quickstart "trainer.experiment_name=$name-teacher"
teacher=$(ls -d "runs/rlfuse/$name-teacher/global_step_"*/actor/huggingface | sort -V | tail -n 1)
echo "[distill] distilling it"
exec rlfuse train experiment=quickstart algorithm=distill ref.path="$teacher" \
    "trainer.experiment_name=$name-student" trainer.test_freq=4 "$@"
