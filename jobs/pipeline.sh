#!/usr/bin/env bash
# All stages on the bundled task: supervised fine-tuning; then preference pairs of its model's own responses; from these
# pairs DPO, and a reward model with PPO against it. The task's rule labels the pairs and scores the policy of each stage.
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
    rlfuse train "trainer.experiment_name=$name-$1" "${@:2}"
}

rlfuse prepare quickstart
rlfuse prepare demonstrations
train sft experiment=sft trainer.total_training_steps=8
policy=$(weights_of sft actor)
echo "[pipeline] responses of this model, in pairs"
run=runs/rlfuse/$name-sft
rlfuse generate experiment=quickstart "$policy" --prompts .cache/rlfuse/remainder/train.parquet --score \
    --out "$run/samples_for_pairs.jsonl" rollout.val_kwargs.n=8 rollout.val_kwargs.temperature=1
rlfuse prepare pairs --from "$run/samples_for_pairs.jsonl" --out "$run/pairs"
pairs=("data.train_files=[$run/pairs/train.parquet]" "data.val_files=[$run/pairs/val.parquet]" "model.path=$policy")
# With beta=0.1 the policy moves so far from the fine-tuned model that its held-out accuracy falls.
train dpo experiment=dpo "${pairs[@]}" dpo.beta=0.5 trainer.total_training_steps=40
train reward_model experiment=reward_model "${pairs[@]}" trainer.total_training_steps=60
# The rule only validates. Without a penalty on the KL to the fine-tuned model, PPO soon exploits the reward model.
train ppo experiment=quickstart "model.path=$policy" "reward.model_path=$(weights_of reward_model reward_model)" \
    'reward.weights=[0,1]' algorithm.kl_ctrl.kl_coef=0.2 trainer.total_training_steps=10 trainer.test_freq=2 "$@"
for stage in sft dpo ppo; do
    echo "[pipeline] held-out accuracy after $stage"
    rlfuse eval experiment=quickstart "$(weights_of "$stage" actor)"
done
