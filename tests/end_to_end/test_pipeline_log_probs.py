"""The update of a first mini-batch on real pipelines returns the old log-probs that a separate pass would give."""

from dataclasses import replace

import numpy as np
import pytest
from probing import COUNTS, LAYOUTS, OPPOSITE, schedule
from single_process import lengths, make_rows, settings
from trainer_probe import scores_of

from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.fusion.schedules.planning import Planner


def bare_and_scored(rows, old):
    """Return the rows without old log-probs, and with `old`."""
    bare = [replace(row, tensors={k: v for k, v in row.tensors.items() if k != "old_log_probs"}) for row in rows]
    return bare, [replace(r, tensors=r.tensors | {"old_log_probs": o}) for r, o in zip(bare, old, strict=True)]


@pytest.mark.parametrize("layout", [OPPOSITE, LAYOUTS["V, dp 2"]], ids=["opposite, two blocks", "V, dp 2"])
async def test_the_update_equals_one_after_a_separate_pass(four, pipeline_models, layout):
    """Log-probs are in the order of the rows, from every pipeline, without fillers."""
    config, rows, found = settings(pipeline_models, critic_layers=4), make_rows(9, 1), []
    for passes in (True, False):
        await four.take(config, layout)
        if passes:
            bare, learned = bare_and_scored(rows, old := await scores_of(four, "actor", rows))
        execution = await four.run(
            schedule("fused", layout, True), {name: rows if name == "critic" else learned for name in COUNTS}
        )
        found.append(await four.step("actor", lengths(rows)))
        assert execution.scores == {} and len(execution.old_log_probs) == (0 if passes else len(rows))
        learned = bare
    for have, want in zip(execution.old_log_probs, old, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-6)
    assert found[1]["actor/ppo_kl"] == 0 and found[1]["actor/grad_norm"] > 0
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)


async def test_other_rows_are_scored_in_the_same_schedule(four, pipeline_models):
    """Log-probs of trained rows and of rows scored by the same model are not mixed up."""
    layout = (Pipelines("actor", 2), Pipelines("ref", 2, direction="up"))
    trained, scored = make_rows(5, 1), make_rows(7, 2)
    await four.take(settings(pipeline_models, critic_layers=4), layout)
    alone = [await scores_of(four, "actor", each) for each in (trained, scored)]
    plan = Planner(2, split=True).plan({"actor": 4}, {"actor": 2, "ref": 3})
    bare, _ = bare_and_scored(trained, alone[0])
    execution = await four.run(plan.rows, {"actor": bare}, {"actor": scored, "ref": scored})
    for have, want in zip((execution.old_log_probs, execution.scores["actor"]), alone, strict=True):
        np.testing.assert_allclose(np.concatenate(have), np.concatenate(want), atol=1e-6)
    assert (await four.step("actor", lengths(trained)))["actor/ppo_kl"] == 0
