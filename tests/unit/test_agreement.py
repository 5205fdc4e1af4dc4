"""Engine/trainer consistency check: the tokens compared, and the outcome for a run whose log-probs differ."""

import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from rlfuse.config.schema import Config
from rlfuse.errors import EngineError, EngineLost
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.summary import summarise
from rlfuse.protocols import DeviceSharing, Engines, NoClips, PassResult, Sampling
from rlfuse.samples import Prompt, Response, make_groups
from rlfuse.step.agreement import SAMPLES_PER_ENGINE, compare
from rlfuse.step.groups import GroupSource

SAMPLING = Sampling(1.0, 1.0, -1, 5)


class Engine:
    """Rollout engine whose log-probs differ by `shift` from the trainer's, or that is lost if `shift` is None."""

    def __init__(self, shift, calls):
        self.shift, self.calls = shift, calls

    async def generate(self, samples, sampling, partials=None):
        if self.shift is None:
            raise EngineLost("lost")
        for sample in samples:
            log_probs = np.full(sampling.max_tokens, -1.0, np.float32)
            log_probs[2] += self.shift
            yield sample.id, Response(np.arange(sampling.max_tokens), log_probs, "length", 0, "")

    async def sleep(self, discard=False):
        self.calls.append("sleep")

    async def wake(self, part=None):
        self.calls.append("wake")


class Ranks:
    def __init__(self, calls):
        self.calls = calls

    sharing = DeviceSharing()

    async def acquire_device(self, slot):
        self.calls.append("take")

    async def release_device(self, slot):
        self.calls.append("leave")

    async def score(self, models, rows, slot=None):
        self.calls.append(f"{' '.join(models)} {len(rows)}")
        return {"actor": PassResult([np.full(len(row.response_ids), -1.0, np.float32) for row in rows], 0.0)}


async def agreement(*shifts):
    calls = []
    engines = Engines([Engine(shift, calls) for shift in shifts], None, Ranks(calls), None)
    (group,) = make_groups([Prompt(7, np.array([1, 2]), "p", (), "s", None)], 2 * len(shifts), 1, 0)
    return await compare(engines, group, SAMPLING), calls


async def test_every_engine_is_compared_with_the_trainer_and_gets_its_device_back():
    found, calls = await agreement(0.0, -0.25)
    assert found.metrics["training/rollout_log_probs_diff_max"] == 0.25
    assert found.metrics["training/rollout_log_probs_diff_mean"] == pytest.approx(0.25 * 2 / 20)
    assert "20 tokens" in found.text and "token 2 of a response to row 7: -1.25 by rollout/1, -1 by" in found.text
    assert calls == [*["sleep", "take"] * 2, "actor 4", *["leave", "wake"] * 2]


async def test_a_lost_engine_is_skipped():
    found, calls = await agreement(None, 0.0)
    assert found.metrics["training/rollout_log_probs_diff_max"] == 0 and "actor 2" in calls
    assert (await agreement(None))[0] is None


class Clips:
    """Encoder that fails for the clips of the prompts in `broken`."""

    def __init__(self, broken):
        self.broken, self.seen = broken, []

    async def encode(self, groups, holder, check_failures=True):
        assert not check_failures, "one bad clip in a batch of one would end the run"
        self.seen += [group.prompt.index for group in groups]
        return [group for group in groups if group.prompt.index not in self.broken]


def groups_of(prompts, clips, output):
    engines, source = Engines([None, None], None, None, None, clips), SimpleNamespace(prompts=prompts)
    return GroupSource(
        config=Config(), engines=engines, prompts=source, selection=None, recorder=None, say=output.append
    )


async def test_the_prompt_with_most_features_is_compared():
    def prompt(index, tokens, clip):
        return Prompt(index, np.zeros(tokens), "p", (), "s", None, visual=(object(),) if clip else ())

    prompts = [prompt(0, 10, False), prompt(1, 2000, False), prompt(2, 9000, True), prompt(3, 80, True)]
    clips, output = Clips({3}), []
    group = await groups_of(prompts, clips, output).comparison_group(0)
    assert clips.seen == [3, 2] and group.prompt.index == 2 and len(group.samples) == 2 * SAMPLES_PER_ENGINE
    assert await groups_of(prompts[2:], Clips({2, 3}), output).comparison_group(0) is None
    assert "Skipping the engine/trainer consistency check" in output[0]
    assert (await groups_of(prompts[:2], NoClips(), output).comparison_group(0)).prompt.index == 1, (
        "the prompt is longer than sliding windows"
    )


async def test_a_mismatched_run_stops_or_is_labelled(tmp_path, capsys):
    config = Config()
    config.model.dtype, config.trainer.logger = "float32", ["console"]
    found, _ = await agreement(0.0, -0.25)
    with closing(RunLog(config, {}, tmp_path, total_steps=1, start=0)) as log:
        with pytest.raises(
            EngineError, match=r"-1.25 by rollout/1, -1 by the trainer.*float32.*rollout.on_mismatch=alert"
        ):
            log.metrics.log_agreement(0, found)
        config.rollout.on_mismatch = "alert"
        log.metrics.log_agreement(0, found)
        assert "engine and trainer disagree" in capsys.readouterr().out
        assert log.metrics.label({}) == "mismatched"
    with closing(RunLog(config, {}, tmp_path, 1, 0)) as log:
        assert log.metrics.label({}) == "exact"
        assert log.metrics.label(found.metrics) == "mismatched", "a later step has the mismatch"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "fusion/mismatched": 1.0}) + "\n")
    assert summarise(tmp_path, config, 1.0)["label"] == "mismatched"
    assert "exact" not in capsys.readouterr().out
