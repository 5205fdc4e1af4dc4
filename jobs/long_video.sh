#!/usr/bin/env bash
# From a fresh checkout to a video model that learned to watch: real clips of ten seconds to ten minutes, GRPO or PPO.
#
#   bash jobs/long_video.sh                                      GRPO
#   bash jobs/long_video.sh algorithm=ppo                        PPO with a critic
#   bash jobs/long_video.sh video.freeze_vision_tower=false             the vision tower learns too
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

echo "[long_video] making clips, questions and the model to start from"
rlfuse prepare long_video
echo "[long_video] training"
exec rlfuse train experiment=long_video "$@"
