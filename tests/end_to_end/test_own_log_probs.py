"""Steps of one mini-batch: a job's curves are those with a pass for old log-probs; rows of pipelines gain their own."""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from pipelines import Anywhere
from probing import COUNTS, LAYOUTS, OPPOSITE, Probe, schedule
from single_process import FAMILIES, VOCABULARY, lengths, make_rows, settings

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.events import read_events
from rlfuse.fusion.schedules.planning import Planner
from rlfuse.observe.tracking import read_metrics


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


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_jobs_curves_are_to_the_last_bit_those_with_a_pass_before(driven, tmp_path, epochs):
    """KL in the reward of coefficient 0 asks for the pass, and changes no reward. A row is a micro-batch in both."""
    settings = {
        "data.max_response_length": 24, "data.train_batch_size": 6, "actor.ppo_mini_batch_size": 6, "rollout.n": 2,
        "actor.ppo_micro_batch_size_per_gpu": 1, "actor.ppo_epochs": epochs, "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 3, "trainer.val_before_train": "false", "fusion": "serial",
    }  # fmt: skip
    needed = {"algorithm.use_kl_in_reward": "true", "algorithm.kl_ctrl.kl_coef": 0}
    rows, passes = [], []
    for name, more in (("own", {}), ("before", needed)):
        changed = settings | {"trainer.experiment_name": name} | more
        status, text = driven("rlfuse_command", tmp_path, "train", **changed)
        assert status == 0, text
        run = tmp_path / "runs" / "rlfuse" / name
        rows.append([row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0])
        driver = [span for span in read_events(run / "events.jsonl") if span.where == "driver"]
        passes.append({span.step for span in driver if span.kind == "old_log_prob"})
    assert passes == [set(), {1, 2, 3}] and len(rows[0]) == len(rows[1]) == 3
    told = ("actor/", "critic/rewards", "critic/advantages", "response_length/", "training/rollout_")
    for have, want in zip(*rows, strict=True):
        names = [name for name in want if name.startswith(told)]
        assert {"actor/ppo_kl", "actor/grad_norm", "training/rollout_probs_diff_max"} <= {*names}
        np.testing.assert_equal({name: have[name] for name in names}, {name: want[name] for name in names})
