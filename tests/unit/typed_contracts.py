"""Static check that every implementation satisfies its protocol; type-checked by test_types.py, never executed."""

from __future__ import annotations

from rlfuse.algorithms.experience import Experience
from rlfuse.data.prompts import PromptSource
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.memory import ZeroMemory
from rlfuse.engines.fsdp2.fsdp2_model import Fsdp2Model
from rlfuse.engines.fsdp2.memory import Fsdp2Memory
from rlfuse.engines.memory.model_memory import ModelMemory
from rlfuse.engines.pipeline.head_shares import HeadShares
from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer
from rlfuse.engines.rollout.engine_actor import EngineActor
from rlfuse.engines.rollout.rollout_handle import RolloutHandle
from rlfuse.engines.trainer.sharded_model import ShardedModel, StagesModel
from rlfuse.engines.trainer.tensor_parallel import TensorParallelGroup, TensorShares
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.transformers.transformers_engine import TransformersEngine
from rlfuse.engines.vllm.rollout_worker import RolloutWorker
from rlfuse.engines.weights.sync import WeightPush
from rlfuse.fusion import selection
from rlfuse.health.monitor import Monitor
from rlfuse.observe.run_log import RunLog
from rlfuse.protocols import Clips, Recorded, RewardScorer, RolloutEngine, Stages, Trainer, WeightSync, WholeModels
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.simulate.devices import SimulatedReward, SimulatedTrainer, SimulatedWeights
from rlfuse.simulate.rollout import SimulatedRollout
from rlfuse.step import protocols
from rlfuse.step.draining import Draining
from rlfuse.video.step_clips import StepClips


def rollout_engines(real: RolloutHandle, simulated: SimulatedRollout) -> list[RolloutEngine]:
    return [real, simulated]


def engine_actors(vllm: RolloutWorker, transformers: TransformersEngine) -> list[EngineActor]:
    return [vllm, transformers]


def backends() -> list[type[EngineActor]]:
    return [RolloutWorker, TransformersEngine]


def sharded_models(deepspeed: DeepSpeedModel, fsdp2: Fsdp2Model) -> list[ShardedModel]:
    return [deepspeed, fsdp2]


def trainer_backends() -> list[type[ShardedModel]]:
    return [DeepSpeedModel, Fsdp2Model]


def stages_models(deepspeed: DeepSpeedModel) -> list[StagesModel]:
    return [deepspeed]


def tensor_shares(layers: TensorParallelGroup, head: HeadShares) -> list[TensorShares]:
    return [layers, head]


def model_memories(zero: ZeroMemory, fsdp2: Fsdp2Memory) -> list[ModelMemory]:
    return [zero, fsdp2]


def reward_scorers(real: RewardPool, simulated: SimulatedReward) -> list[RewardScorer]:
    return [real, simulated]


def trainers(whole: TrainerGroup, stages: PipelineTrainer, simulated: SimulatedTrainer) -> list[Trainer]:
    return [whole, stages, simulated]


def whole_models(real: TrainerGroup, simulated: SimulatedTrainer) -> list[WholeModels]:
    return [real, simulated]


def stages(real: PipelineTrainer) -> Stages:
    return real


def weights(real: WeightPush, simulated: SimulatedWeights) -> list[WeightSync]:
    return [real, simulated]


def clips(real: StepClips) -> Clips:
    return real


def prompts(real: PromptSource) -> selection.Source:
    return real


def experience(real: Experience) -> protocols.Experience:
    return real


def recorded(slots: Draining) -> Recorded:
    return slots


def health(real: Monitor) -> list[protocols.Health]:
    return [real, protocols.NoHealth()]


def journal(log: RunLog) -> protocols.Journal:
    return log.journal


def metrics(log: RunLog) -> protocols.Metrics:
    return log.metrics


def failures(log: RunLog) -> protocols.FailureBudget:
    return log.failures


def checkpoints(real: Checkpointing) -> protocols.Checkpoints:
    return real
