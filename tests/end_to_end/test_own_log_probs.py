"""Rows that come to pipelines without old log-probs: they gain those of their update's own forward pass."""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from pipelines import Anywhere
from probing import COUNTS, LAYOUTS, OPPOSITE, Probe, schedule
from single_process import FAMILIES, VOCABULARY, lengths, make_rows, settings

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.fusion.schedules.planning import Planner


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One random model of four layers for the actor and the critic."""
    torch.manual_seed(0)
    config, model, more = FAMILIES["qwen2"]
    small = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=128, initializer_range=0.05, num_hidden_layers=4,
    )  # fmt: skip
    folder = str(tmp_path_factory.mktemp("qwen2"))
    model(config(**small, **more)).save_pretrained(folder)
    return {("qwen2", 4): folder, ("qwen2", 2): folder}


@pytest.fixture(scope="module")
async def four(folders, slots):
    group, _ = await Probe.start(settings(folders), Anywhere(None, 4, "cpu"), OPPOSITE, 10)
    yield group
    for rank in group.ranks:
        ray.kill(rank)


def bare_and_scored(rows, old):
    """The rows without old log-probs, and with these."""
    bare = [replace(row, tensors={k: v for k, v in row.tensors.items() if k != "old_log_probs"}) for row in rows]
    return bare, [replace(r, tensors=r.tensors | {"old_log_probs": o}) for r, o in zip(bare, old, strict=True)]


@pytest.mark.parametrize("layout", [OPPOSITE, LAYOUTS["V, dp 2"]], ids=["opposite, two blocks", "V, dp 2"])
async def test_the_update_is_that_of_a_pass_before_it(four, folders, layout):
    """In the order of the rows, from every pipeline, fillers among them."""
    config, rows, found = settings(folders), make_rows(9, 1), []
    for passes in (True, False):
        await four.take(config, layout)
        if passes:
            bare, learned = bare_and_scored(rows, old := await four.log_probs("actor", rows))
        execution = await four.run(
            schedule("fused", layout, True), {name: rows if name == "critic" else learned for name in COUNTS}
        )
        found.append(await four.step("actor", lengths(rows)))
        assert execution.scores == {} and len(execution.gained) == (0 if passes else len(rows))
        learned = bare
    for have, want in zip(execution.gained, old, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-6)
    assert found[1]["actor/ppo_kl"] == 0 and found[1]["actor/grad_norm"] > 0
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)


async def test_other_rows_are_scored_in_the_same_schedule(four, folders):
    """What is trained and what is scored by the same model are told apart."""
    layout = (Pipelines("actor", 2), Pipelines("ref", 2, direction="up"))
    trained, scored = make_rows(5, 1), make_rows(7, 2)
    await four.take(settings(folders), layout)
    alone = [await four.log_probs("actor", each) for each in (trained, scored)]
    plan = Planner(2, split=True).plan({"actor": 4}, {"actor": 2, "ref": 3})
    bare, _ = bare_and_scored(trained, alone[0])
    execution = await four.run(plan.rows, {"actor": bare}, {"actor": scored, "ref": scored})
    for have, want in zip((execution.gained, execution.scores["actor"]), alone, strict=True):
        np.testing.assert_allclose(np.concatenate(have), np.concatenate(want), atol=1e-6)
    assert (await four.step("actor", lengths(trained)))["actor/ppo_kl"] == 0
