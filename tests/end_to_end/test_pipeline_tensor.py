"""Pipeline stages with tensor parallelism against one process, on four real ranks."""

import asyncio

import numpy as np
import pipelines
import pytest
import ray
import torch
from pipelines import serial
from probing import COUNTS, TWO_CRITICS, distance, fourth_step, state, three_steps
from safetensors.torch import load_file
from single_process import BATCHES, ThreeSteps, Whole, lengths, make_rows, settings
from trainer_probe import scores_of
from transformers import Qwen2ForCausalLM

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.trainer.models import load_policy

ray.cloudpickle.register_pickle_by_value(pipelines)  # ranks can't import from tests


def of_width(width, stages, **more):
    return Pipelines("actor", stages, width=width, **more), Pipelines("critic", stages, direction="up", width=width)


LAYOUTS = {
    "2 stages of 2": of_width(2, 2),
    "V of 2": of_width(2, 2, chunks=2),
    "dp 2 of 2": of_width(2, 1),
    "1 stage of 4": of_width(4, 1),  # two ranks share a key/value head
}


@pytest.fixture(scope="module")
def folders(pipeline_models):
    return pipeline_models


@pytest.mark.parametrize(
    "name, family, order, split",
    [
        ("2 stages of 2", "llama", "fused", True),
        ("2 stages of 2", "qwen3", "fused", False),
        ("V of 2", "qwen2", "fused", True),
        ("dp 2 of 2", "qwen2", "serial", True),
        ("1 stage of 4", "qwen3", "serial", True),
    ],
)
async def test_shared_layers_train_as_one_process(four, folders, name, family, order, split):
    """With tied and untied weights, clipping by the norm over all ranks and stages, entropy and KL in the loss.

    In a V, activations are recomputed. Gradients of the first step agree to 3e-6 of their norm, later results to 1e-4:
    AdamW divides gradients by their own size, and query and key norms have many elements next to zero.
    """
    config = settings(folders, family, clip=0.1)
    config.model.enable_gradient_checkpointing = LAYOUTS[name][0].chunks > 1
    gradients, parameters, metrics = await three_steps(four, config, LAYOUTS[name], order, split)
    for name in COUNTS:
        expected = ThreeSteps(config, name)
        found = [distance(*pair) for pair in zip(gradients[name], expected.gradients, strict=True)]
        assert found[0] < 3e-6 and max(found) < 1e-4, (name, found)
        assert distance(parameters[name], expected.parameters) < 1e-5
        assert [each[f"{name}/grad_norm"] for each in metrics] == pytest.approx(expected.norms, rel=1e-5)
    _, expected = Whole(config, "actor").step(BATCHES[0])
    assert expected.items() <= {key: pytest.approx(each, rel=1e-4) for key, each in metrics[0].items()}.items()


async def test_passes_score_as_one_process(four, folders):
    """Actor and reference, packed and padded; each token is counted on one rank of a tensor parallel group."""
    config, rows = settings(folders, "qwen3"), make_rows(9, 1)
    want = np.concatenate(Whole(config, "actor").score(rows))
    layout = (*LAYOUTS["2 stages of 2"], Pipelines("ref", 2, direction="up", width=2))
    for packed in (True, False):
        config.model.use_remove_padding = packed
        config.actor.ppo_max_token_len_per_gpu = 40
        await four.take(config, layout)
        await four.drain()
        for model in ("actor", "ref"):
            np.testing.assert_allclose(np.concatenate(await scores_of(four, model, rows)), want, atol=1e-5)
    tokens = sum(span.tokens for span in await four.drain() if span.kind == "forward")
    assert tokens == 2 * 2 * sum(row.tokens for row in rows), (
        "tokens are not counted once for each of two stages of two models"
    )


async def test_training_resumes_exactly_for_every_tensor_parallel_size(four, folders, tmp_path):
    """A checkpoint saved again is bitwise equal, in Hugging Face's layout; the next step differs by rounding only."""
    config, layout = settings(folders, clip=0.1), LAYOUTS["2 stages of 2"]
    _, trained, _ = await three_steps(four, config, layout, "fused", True)
    await four.save(tmp_path / "saved")
    saved, (metrics, parameters) = state(tmp_path / "saved"), await fourth_step(four)
    for i, other in enumerate([layout, TWO_CRITICS, LAYOUTS["1 stage of 4"]]):
        await four.take(config, other)
        await four.load(tmp_path / "saved")
        await four.save(tmp_path / str(i))
        again = state(tmp_path / str(i))
        assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
        found, resumed = await fourth_step(four)
        assert found == pytest.approx(metrics, rel=1e-5 if i else 0, abs=0)
        assert all(distance(resumed[name], parameters[name]) <= (1e-5 if i else 0) for name in COUNTS)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "saved" / "actor" / "huggingface")
    assert distance({key: p.detach() for key, p in model.named_parameters()}, trained["actor"]) == 0


async def test_exported_buckets_hold_whole_tensors(four, folders, tmp_path):
    """One layer per bucket, gathered from the ranks that share it."""
    config = settings(folders)
    config.rollout.update_weights_bucket_mb, found = 0, {}
    await four.take(config, LAYOUTS["2 stages of 2"])
    plan = await four.bucket_plan()
    for i, names in enumerate(plan):
        await four.export_bucket(names, str(tmp_path / f"{i}.safetensors"))
        found |= load_file(tmp_path / f"{i}.safetensors")
    assert {four.writer(names) for names in plan} == {0, 2}
    policy = load_policy(config.model.path, config.model)
    assert distance(found, {key: p.detach() for key, p in policy.named_parameters()}) == 0


async def test_layers_move_off_a_slow_tensor_parallel_group(four, folders, tmp_path):
    """A group is as slow as its slowest rank. Moving layers leaves no process group behind."""
    layout = LAYOUTS["2 stages of 2"]

    async def groups():
        """Return the number of process groups of each rank."""
        counted = [
            rank.__ray_call__.remote(lambda _: len(torch.distributed.distributed_c10d._world.pg_map))
            for rank in four.ranks
        ]
        return await asyncio.gather(*counted)

    await three_steps(four, settings(folders), layout, "serial", False)
    await four.save(tmp_path)
    before = await groups()
    try:
        for rates, layers in ([1.0, 1.0, 3.0, 1.0], (3, 1)), ([1.0, 3.0, 1.0, 1.0], (1, 3)):
            await four.replan(rates)
            assert await four.move_layers(tmp_path) and four.layout["actor"].layers == layers
            assert await groups() == before
    finally:
        await four.replan([])
    await four.run(serial(layout, COUNTS), dict.fromkeys(COUNTS, BATCHES[0]))
    assert (await four.step("actor", lengths(BATCHES[0])))["actor/grad_norm"] > 0
