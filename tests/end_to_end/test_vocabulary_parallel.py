"""Vocabulary-parallel heads of pipeline stages against one process, on real ranks."""

import numpy as np
import pipelines
import pytest
import ray
import torch
from pipelines import fused
from probing import COUNTS, distance, fourth_step, schedule, started_group, state, three_steps
from safetensors.torch import load_file
from single_process import BATCHES, ThreeSteps, Whole, lengths, make_rows, settings
from trainer_probe import scores_of
from transformers import Qwen2ForCausalLM

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.trainer.models import load_policy
from rlfuse.errors import EngineError
from rlfuse.fusion.schedules.planning import Planner

ray.cloudpickle.register_pickle_by_value(pipelines)  # ranks can't import from tests


def shared(stages, **more):
    """Return the layout of an actor with a shared head, and of the critic."""
    return Pipelines("actor", stages, vocabulary=True, **more), Pipelines("critic", 2, stages // 2, "up")


LAYOUTS = {
    "2 stages": (2, shared(2)),
    "4 stages": (4, shared(4)),
    "2 stages, dp 2": (4, shared(2)),
    "V": (2, shared(2, chunks=2)),
    "interleaved": (2, shared(2, chunks=2, placement="interleaved")),
}
WHOLE = (Pipelines("actor", 2), Pipelines("critic", 2, direction="up"))


@pytest.fixture(scope="module")
def folders(pipeline_models):
    return pipeline_models


@pytest.fixture(scope="module")
async def groups(folders, four, slots):
    """Yield groups of two and of four ranks."""
    async for two in started_group(folders, 2, shared(2)):
        yield {2: two, 4: four}


def assert_like_one_process(config, gradients, parameters, metrics):
    """Compare with the tolerances of whole heads."""
    for name in COUNTS:
        expected = ThreeSteps(config, name)
        found = [distance(*pair) for pair in zip(gradients[name], expected.gradients, strict=True)]
        assert found[0] < 1e-6 and max(found) < 1e-5, (name, found)
        assert distance(parameters[name], expected.parameters) < 1e-5
        assert [each[f"{name}/grad_norm"] for each in metrics] == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize(
    "name, family, order, split",
    [
        ("2 stages", "qwen2", "serial", False),
        ("4 stages", "llama", "fused", True),
        ("4 stages", "qwen3", "serial", True),
        ("2 stages, dp 2", "qwen2", "fused", False),
        ("V", "llama", "fused", True),
        ("interleaved", "qwen2", "fused", False),
    ],
)
async def test_shared_heads_train_as_one_process(groups, folders, name, family, order, split):
    """With tied and untied weights, clipping, entropy and KL in the loss."""
    ranks, layout = LAYOUTS[name]
    config = settings(folders, family, clip=0.1)
    assert_like_one_process(config, *await three_steps(groups[ranks], config, layout, order, split))


async def test_metrics_equal_those_of_one_process(groups, folders):
    """Also entropy with a coefficient of 0."""
    config = settings(folders)
    config.actor.entropy_coeff = 0.0
    await groups[4].take(config, shared(4))
    groups[4].rows = schedule("fused", shared(4), False)
    found = await groups[4].train(BATCHES[0])
    _, expected = Whole(config, "actor").step(BATCHES[0])
    assert expected.items() <= {name: pytest.approx(each, rel=1e-4) for name, each in found.items()}.items()


@pytest.mark.parametrize("name", LAYOUTS)
async def test_passes_score_as_one_process(groups, folders, name):
    """Actor and reference in separate passes and within a training schedule, which also returns old log-probs."""
    ranks, layout = LAYOUTS[name]
    group, config, rows = groups[ranks], settings(folders, "llama"), make_rows(9, 1)
    config.actor.ppo_max_token_len_per_gpu = 40
    reference = Pipelines("ref", layout[0].stages, direction="up", vocabulary=True)
    await group.take(config, (layout[0], layout[1], reference) if layout[0].chunks == 1 else layout)
    want = np.concatenate(Whole(config, "actor").score(rows))
    for model in set(group.layout) - {"critic"}:
        np.testing.assert_allclose(np.concatenate(await scores_of(group, model, rows)), want, atol=1e-5)
    bare = [type(row)(row.prompt_ids, row.response_ids, dict(row.tensors), id=row.id) for row in rows]
    for row in bare:
        del row.tensors["old_log_probs"]
    if layout[0].chunks == 1:
        planner = Planner(layout[0].stages, split=True, vocabulary=True)
        plan = planner.plan({"actor": 4}, {"actor": 2, "ref": 3})
        done = await group.run(plan.rows, {"actor": bare}, {"actor": rows, "ref": rows})
        for scores in (done.old_log_probs, done.scores["actor"], done.scores["ref"]):
            np.testing.assert_allclose(np.concatenate(scores), want, atol=1e-5)
        await group.step("actor", lengths(bare))


@pytest.mark.parametrize("family, dtype", [("qwen2", "float32"), ("llama", "bfloat16")])
async def test_training_resumes_exactly_with_a_shared_head_and_without(groups, folders, tmp_path, family, dtype):
    """A checkpoint saved again is bitwise equal, in Hugging Face's layout; the next step differs by rounding only."""
    config, tied = settings(folders, family, clip=0.1, dtype=dtype), family == "qwen2"
    _, trained, _ = await three_steps(groups[4], config, shared(4), "fused", True)
    await groups[4].save(tmp_path / "saved")
    saved, (metrics, parameters) = state(tmp_path / "saved"), await fourth_step(groups[4])
    tolerance = 1e-5 if dtype == "float32" else 0.02
    for i, (ranks, layout) in enumerate([(4, shared(4)), (2, WHOLE), (2, shared(2, chunks=2)), (4, shared(2))]):
        group = groups[ranks]
        await group.take(config, layout)
        await group.load(tmp_path / "saved")
        await group.save(tmp_path / str(i))
        again = state(tmp_path / str(i))
        assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
        assert distance(await group.tensors("actor", "data"), trained["actor"]) == 0
        found, resumed = await fourth_step(group)
        assert found == pytest.approx(metrics, rel=tolerance if i else 0, abs=0)
        assert distance(resumed["actor"], parameters["actor"]) <= (tolerance if i else 0)
    if tied:
        model, report = Qwen2ForCausalLM.from_pretrained(tmp_path / "0/actor/huggingface", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert distance({key: p.detach() for key, p in model.named_parameters()}, trained["actor"]) == 0


@pytest.mark.parametrize("family", ["qwen2", "llama"])
async def test_buckets_hold_whole_tensors_with_the_names_of_checkpoints(groups, folders, tmp_path, family):
    config = settings(folders, family)
    config.rollout.update_weights_bucket_mb = 0
    await groups[4].take(config, shared(4))
    found, policy = {}, load_policy(config.model.path, config.model)
    for i, names in enumerate(await groups[4].bucket_plan()):
        written = await groups[4].export_bucket(names, str(tmp_path / f"{i}.safetensors"))
        found |= load_file(tmp_path / f"{i}.safetensors")
        assert sorted(written) == sorted(names) and groups[4].writer(names) in range(4)
    assert distance(found, {key: p.detach() for key, p in policy.named_parameters()}) == 0


async def test_a_schedule_in_which_a_device_skips_the_head_is_refused(groups, folders):
    config = settings(folders)
    await groups[2].take(config, shared(2))
    with pytest.raises(EngineError, match=r"The schedule was not started.*H of actor.* is computed by 1 devices"):
        first, second = fused(shared(2), COUNTS, lambda *_: 1.0)
        second = tuple(each for each in second if each.kind != "H")
        await groups[2].run((first, second), {name: [] for name in COUNTS})
