#!/usr/bin/env bash
# All stages on the bundled task: supervised fine-tuning; then, from its model, DPO on preference pairs, and a reward model
# of the same pairs with PPO against it. The task's rule scores the policy of each stage.
#
#   bash jobs/pipeline.sh                                      all stages
#   bash jobs/pipeline.sh trainer.total_training_steps=60      settings of PPO can be changed
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

name=pipeline-$(date +%m%d-%H%M%S)
weights_of() { # stage, model: the newest checkpoint of that stage
    ls -d "runs/rlfuse/$name-$1/global_step_"*/"$2"/huggingface | sort -V | tail -n 1
}
train() { # stage, settings
    echo "[pipeline] $1"
    python -m rlfuse.train "trainer.experiment_name=$name-$1" "${@:2}"
}

python -m rlfuse.cli prepare quickstart
python -m rlfuse.cli prepare demonstrations
python -m rlfuse.cli prepare preferences
train sft experiment=sft trainer.total_training_steps=8
policy=$(weights_of sft actor)
train dpo experiment=dpo "model.path=$policy"
train reward_model experiment=reward_model "model.path=$policy"
train ppo experiment=quickstart "model.path=$policy" "reward.model_path=$(weights_of reward_model reward_model)" \
    'reward.weights=[0,1]' trainer.test_freq=4 "$@"
for stage in sft dpo ppo; do
    echo "[pipeline] held-out accuracy after $stage"
    python -m rlfuse.cli eval experiment=quickstart "$(weights_of "$stage" actor)"
done
