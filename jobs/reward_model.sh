#!/usr/bin/env bash
# From preferences to a policy: pairs of a noisy labeller, a reward model learned from them, PPO against that model. The
# true rule has weight 0, it only watches; proxy_and_truth.png in the last run folder shows both.
#
#   bash jobs/reward_model.sh                                      the whole chain
#   bash jobs/reward_model.sh trainer.total_training_steps=60      settings of the last part can be changed
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

name=preferences-$(date +%m%d-%H%M%S)
echo "[reward_model] preparing preferences, prompts and the model to start from"
rlfuse prepare quickstart
rlfuse prepare preferences
echo "[reward_model] training the reward model"
rlfuse train experiment=reward_model "trainer.experiment_name=$name-model"
weights=$(ls -d "runs/rlfuse/$name-model/global_step_"*/reward_model/huggingface | sort -V | tail -n 1)
echo "[reward_model] PPO against it"
exec rlfuse train experiment=quickstart "trainer.experiment_name=$name-policy" \
    "reward.model_path=$weights" 'reward.weights=[0,1]' trainer.test_freq=2 trainer.total_training_steps=16 "$@"
