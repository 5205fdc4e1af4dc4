"""Generate and score responses without a trainer, with the board, executor and engines of a run's validation.

    Ray, slots -> vision towers | engines | reward workers -> Board -> Executor -> samples --> Responses, every 0.5 s

A lost engine is not replaced; the other engines take over its samples.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlfuse.cluster import placement, process_logs
from rlfuse.cluster.nodes import fail_on_lost_node
from rlfuse.config.custom_functions import with_values
from rlfuse.config.sampling import validation
from rlfuse.config.schema import Config
from rlfuse.data.prompts import load_prompts
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.engines.rollout.engine_actor import engine_actor
from rlfuse.engines.vllm.support import unsupported_judge_reasons
from rlfuse.errors import ConfigError, EngineError, first_error
from rlfuse.events import Recorder
from rlfuse.fusion.board import Board
from rlfuse.fusion.policies import stream
from rlfuse.fusion.slot_table import SlotTable
from rlfuse.protocols import DeviceSharing, Engines, NoClips
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.run import WORKER_IMPORTS, inference
from rlfuse.run.drafting import with_drafts
from rlfuse.run.starting import end_all, start_parts, with_progress
from rlfuse.samples import VALIDATION, Group, make_groups
from rlfuse.step.executor import Executor, StepContext
from rlfuse.stopping import NAMES, Stopped, Stopping
from rlfuse.tools.evaluation.display import Display
from rlfuse.tools.evaluation.responses import Responses
from rlfuse.video.video_model import VideoModel

WRITE_S = 0.5
WRITES_PER_DRAIN = 60
PURPOSE = "testing"


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """Loaded and checked inputs of an evaluation; `config` has the paths of the models that engines load."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    groups: list[Group]
    reward: RewardPool | None
    video_model: VideoModel | None


def load(config: Config, step: int, scored: bool, say: Callable[[str], None]) -> EvaluationInputs:
    """Load tokenizer, prompts and rewards. Samples are those of the validation after `step`."""
    reward = inference.reward_pool(config) if scored else None
    judges = unsupported_judge_reasons(config) if scored else ()
    if problems := [*engine_actor(config.rollout.name).unsupported_reasons(config, trains=False), *judges]:
        raise ConfigError(problems)
    video_model, tokenizer = inference.video_model_of(config), load_tokenizer(config.model)
    clips = inference.clip_reader(config, tokenizer, video_model)
    prompts, report = load_prompts(list(config.data.val_files), tokenizer, config.data, clips)
    say(str(report))
    if reward is not None:
        reward.check_prompts(prompts, config.reward.max_failure_rate)
    groups = make_groups(prompts, config.rollout.val_kwargs.n, config.data.seed, step, scope=VALIDATION)
    return EvaluationInputs(config, tokenizer, groups, reward, video_model)


class _NoTrainer:
    """Placeholder for trainer and weight sync: the engines keep the weights that they loaded."""

    sharing = DeviceSharing()

    async def start(self, let_engines_start: Callable[[], None]) -> tuple[_NoTrainer, dict[str, Any]]:
        return self, {}

    async def measure(self) -> dict[str, Any]:
        return {}

    async def release_device(self, slot: int) -> None: ...

    async def restart_engine(self, slot: int) -> None:
        raise EngineError(
            "The last rollout engine was lost. Rerun the command to continue with the remaining responses."
        )


def answer(loaded: EvaluationInputs, groups: Sequence[Group], responses: Responses, display: Display) -> None:
    """Generate and score `groups` into the file of `responses`. Raises EngineError, or Stopped after a signal."""
    stopping = Stopping(0.0, display.say)
    try:
        with ExitStack() as stack:
            stack.enter_context(process_logs.logs_kept_on_failure(responses.path.absolute().with_suffix(".logs")))
            if loaded.video_model is not None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlfuse-text-part-")))
                loaded = dataclasses.replace(loaded, config=inference.with_served_models(loaded.config, folder))
            asyncio.run(stopping.listen_during(_generate(loaded, groups, responses, display)))
    except Stopped as end:
        message = f"{NAMES[end.by]}: {responses.written:,} complete responses are in {responses.path}"
        raise Stopped(f"{message}. Rerun the command to continue.", end.by) from end
    except BaseExceptionGroup as error:
        raise first_error(error) from error
    finally:
        placement.stop()
        responses.close()
    display.say(f"{display.tokens:,} tokens, {display.speed:,.0f} tokens/s")


async def _generate(loaded: EvaluationInputs, groups: Sequence[Group], responses: Responses, display: Display) -> None:
    config = with_values(loaded.config, {"cluster.max_restarts": 0})  # there are no weights to push to a new engine
    recorder = Recorder("driver")
    with display.part("Ray"):
        slots = await placement.start(config, WORKER_IMPORTS)
    display.say(slots.summary)
    config = inference.with_transfer(config, slots.device)
    if any(sample.drafts for group in groups for sample in group.samples):
        config = with_drafts(config, display.say, trains=False)
    rollouts = inference.rollout_handles(config, slots, recorder, display.say)
    clips = inference.video_parts(config, loaded.video_model, slots, display.say).clips if loaded.video_model else None
    no_trainer, reward = _NoTrainer(), loaded.reward
    try:
        occupants = slots.occupants(config.rollout.tensor_model_parallel_size)
        starts = inference.engine_starts(rollouts, config, slots, display.part)
        rewards = [with_progress(display.part("rewards"), reward.start, slots)] if reward else []
        towers = [with_progress(display.part("encoder ranks"), clips.start)] if clips else []
        reporting = asyncio.ensure_future(display.report_starting())
        try:
            parts = start_parts(slots.device, trainer=no_trainer.start, engines=starts, towers=towers, rewards=rewards)
            facts = (await fail_on_lost_node(parts, occupants)).engine_facts
        finally:
            reporting.cancel()
        engines = Engines(rollouts, reward, no_trainer, no_trainer, clips or NoClips())
        slot_table = SlotTable(len(rollouts), inference.starting_costs(config, facts, slots))
        await fail_on_lost_node(
            run_until_done(config, groups, engines, slot_table, recorder, responses, display), occupants
        )
    finally:
        await end_all([*(handle.stop() for handle in rollouts), *(part.close() for part in (reward, clips) if part)])


async def run_until_done(
    config: Config,
    groups: Sequence[Group],
    engines: Engines,
    slot_table: SlotTable,
    recorder: Recorder,
    responses: Responses,
    display: Display,
) -> None:
    """Generate and score like `Controller.validate`, and write finished responses meanwhile."""
    if any(group.prompt.visual for group in groups):
        with display.part("clips encoded"):
            groups = await engines.clips.encode(groups, PURPOSE)
    if not groups:
        return
    kinds = ("reward",) if engines.reward else ()
    board = Board(groups, slot_table, kinds, purpose=PURPOSE, now=time.monotonic())
    context = StepContext(step=groups[0].samples[0].step, sampling=validation(config))
    execution = Executor(board, engines, stream, context, recorder)
    with display.generating(responses.total, responses.written):
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(_write(engines, recorder, responses, display))
                await execution.run()
                writing.cancel()
        finally:
            _write_finished(responses, display)


async def _write(engines: Engines, recorder: Recorder, responses: Responses, display: Display) -> None:
    recorded = [*engines.rollout, *([engines.reward] if engines.reward else []), engines.clips]
    while True:
        for _ in range(WRITES_PER_DRAIN):
            await asyncio.sleep(WRITE_S)
            _write_finished(responses, display)
        recorder.drain()
        await asyncio.gather(*(each.drain() for each in recorded))


def _write_finished(responses: Responses, display: Display) -> None:
    finished = responses.write()
    display.add(len(finished), sum(len(sample.response.token_ids) for sample in finished))
