"""Build engines, rewards and clips from the configuration, for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from transformers import PreTrainedTokenizerBase

from rlfuse.cluster import cuda, placement
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.config.custom_functions import with_values
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.data.clips import ClipReader
from rlfuse.engines.rollout.engine_actor import engine_actor
from rlfuse.engines.rollout.rollout_handle import RolloutHandle
from rlfuse.engines.trainer.vision_tower import TowerSettings
from rlfuse.engines.weights.sync import resolve_transfer
from rlfuse.errors import ConfigError, VideoError
from rlfuse.events import Recorder
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run.starting import Start, with_progress
from rlfuse.simulate.online_tuning import CALL_S
from rlfuse.video.cache import CacheSettings
from rlfuse.video.decode_pool import DecodePool
from rlfuse.video.encoder_handle import EncoderPlacement
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.encoding import SequenceParallelEncoder
from rlfuse.video.models.base import Route, register_custom_family
from rlfuse.video.step_clips import StepClips
from rlfuse.video.video_model import VideoModel

IMAGES = ".images"


def with_transfer(config: Config, device: str) -> Config:
    """Return the configuration with rollout.weight_transfer resolved for the device."""
    stages = config.training.pipeline_parallel_size
    transfer = resolve_transfer(config.rollout.weight_transfer, device, stages)
    return with_values(config, {"rollout.weight_transfer": transfer})


def rollout_handles(
    config: Config, slots: placement.Slots, recorder: Recorder, say: Callable[[str], None]
) -> list[RolloutHandle]:
    """Create one actor per engine, on the first slot of its tensor-parallel group."""
    width, cluster = config.rollout.tensor_model_parallel_size, config.cluster
    backend = engine_actor(config.rollout.name)

    def create(first: int) -> ray.actor.ActorHandle:
        environment = backend.environment(config, slots.device, range(first, first + width))
        options = slots.engine_options(first, width, environment) | {"max_concurrency": 1000}
        return ray.remote(backend).options(**options).remote(first // width)

    handles = [
        RolloutHandle(
            partial(create, first),
            f"rollout/{first // width}",
            cluster.timeout_s,
            cluster.heartbeat_s,
            cluster.max_restarts,
            starts_immediately=slots.device == "cpu",
            recorder=recorder,
            say=say,
        )
        for first in range(0, slots.count, width)
    ]
    if slots.device == "cuda":  # import early, as engines start after the ranks; `start` reports failed imports
        for handle in handles:
            handle.actor.prepare.remote(config.model)
    return handles


def engine_starts(
    handles: Sequence[RolloutHandle],
    config: Config,
    slots: placement.Slots,
    part: Callable[[str], AbstractContextManager[None]],
    rollout: Callable[[], RolloutConfig] | None = None,
) -> list[Start]:
    """Return one start function per engine. `rollout`: returns the settings if they are decided later."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    cores = slots.cores or [None] * len(handles)
    settings = (longest, slots.device, config.fusion.tail_speculation)

    async def start(handle: RolloutHandle, core: int | None) -> dict:
        return await handle.start(config.model, rollout() if rollout else config.rollout, *settings, core)

    return [
        with_progress(part(f"engine {number} of {len(handles)}"), start, handle, core)
        for number, (handle, core) in enumerate(zip(handles, cores, strict=False), 1)
    ]


def starting_costs(config: Config, facts: Sequence[Mapping[str, Any]], slots: placement.Slots) -> Costs:
    """Return the costs that policies use until the run has measurements. `facts`: those of each engine."""
    return Costs(
        kv_bytes_per_token=facts[0]["kv_bytes_per_token"],
        link_bytes_per_s=_link_speed(config, slots.device),
        max_sequences=config.rollout.max_num_seqs,
        kv_tokens=min(fact["kv_tokens"] for fact in facts),
        max_tokens=config.data.max_response_length,
        score_call_s=CALL_S,
        train_call_s=CALL_S,
    )


def _link_speed(config: Config, device: str) -> float:
    """Return bytes per second between engines of one host; 0 if KV caches can't be transferred."""
    if config.trainer.nnodes > 1 or not engine_actor(config.rollout.name).capabilities.can_move_kv:
        return 0.0
    speed = placement.shared_memory_speed()
    return speed if device == "cpu" else speed / 2  # plus copies from and to the device: an estimate, not measured


def reward_pool(config: Config) -> RewardPool:
    """Return the reward pool of the job; its processes are not started yet."""
    model, timeout_s, required = config.model, config.cluster.timeout_s, config.uses_rewards
    return RewardPool(
        config.reward, model.trust_remote_code, timeout_s, config.data.prompt_key, model.video_family, required
    )


def video_model_of(config: Config) -> VideoModel | None:
    """Return the video model, or None for a text model. Raises ConfigError for an unsupported one."""
    register_custom_family(config.model.video_family)
    try:
        model = VideoModel.from_pretrained(config.model.path, config.model.trust_remote_code)
    except VideoError as error:
        raise ConfigError([f"model.path={config.model.path}: {error}"]) from error
    if model is not None and not engine_actor(config.rollout.name).capabilities.accepts_embeddings:
        why = f"prompts with clips or images are not supported, but {config.model.path} is a video model"
        raise ConfigError([f"rollout.name={config.rollout.name}: {why}; set rollout.name=vllm"])
    if model is None and not config.video.freeze_vision_tower:
        raise ConfigError(
            [f"video.freeze_vision_tower=false: {config.model.path} has no vision tower to train; set it to true"]
        )
    if model is not None and model.family.route is Route.VIDEO_EMBEDS and config.video.timestamps == "seed_vl":
        why = f"engines insert clips of {config.model.path} into the prompt as the model's processor does"
        raise ConfigError([f"video.timestamps=seed_vl: {why}; set it to family"])
    return model


def clip_reader(config: Config, tokenizer: PreTrainedTokenizerBase, model: VideoModel | None) -> ClipReader | None:
    """Return the reader that plans the clips of rows; None for a text model."""
    if model is None:
        return None
    workers, images = config.video.decode_workers * config.slots, Path(config.trainer.default_local_dir) / IMAGES
    return ClipReader(model, config.video, tokenizer, workers, images.absolute())


def with_served_models(config: Config, folder: Path) -> Config:
    """Return the configuration with the model paths that engines and trainers load: text parts where separate."""
    for group in ("model", "critic", "ref"):
        path = getattr(config, group).path
        if path and (whole := VideoModel.from_pretrained(path)):
            config = with_values(config, {f"{group}.path": whole.servable_folder(folder / "text_parts" / group)})
    return config


@dataclass(frozen=True, slots=True)
class VideoParts:
    """Additional parts of a job with a video model."""

    towers: TowerSettings
    clips: StepClips


def video_parts(config: Config, model: VideoModel, slots: placement.Slots, say: Callable[[str], None]) -> VideoParts:
    """Create the vision towers and the clip encoder, without starting them."""
    video, cpu = config.video, slots.device == "cpu"
    settings = EncoderSettings(
        model.folder,
        config.model.video_family,
        slots.device,
        config.model.dtype,
        prefetch_bytes=video.prefetch_mb << 20,
    )
    pool, ranks = DecodePool(video.decode_workers, video.decode_timeout_s), video.encoder_ranks or slots.count
    encoder = SequenceParallelEncoder(
        settings,
        CacheSettings(video.cache_mb << 20, video.disk_cache),
        pool.decode,
        [EncoderPlacement(slots.options(*cuda.encoder_place(rank, ranks, slots.count))) for rank in range(ranks)],
        config.cluster.timeout_s,
        worker_environment(slots.device) if cpu else {},
        [node.id for node in slots.nodes],
    )
    clips = StepClips(encoder, video.max_failure_rate, say, video.encode_ahead)
    return VideoParts(TowerSettings(settings, pool), clips)
