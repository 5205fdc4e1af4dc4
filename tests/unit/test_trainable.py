"""Tokens that the model did not generate are context: no gradient, no log-prob, not counted in means."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_attention import SMALL, answers, pair
from test_experience import config, groups, prepare_and_complete

from rlfuse.algorithms.advantages import ESTIMATORS
from rlfuse.algorithms.experience import Experience
from rlfuse.algorithms.losses import loss_divisor
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.micro_batch_losses import actor_loss, log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.sequence_parallel_packing import Share, fill
from rlfuse.observe.metrics import sample_metrics
from rlfuse.samples import Partial, Response, Row, flattened, per_row

LAYOUTS = [dict(packed=True), dict(packed=False), dict(packed=True, shared=True)]


def episodes() -> list[Row]:
    """Return rows of two turns around an observation of two tokens; the last row ends with an observation."""
    rng, rows = np.random.default_rng(1), []
    for number, row in enumerate(answers()):
        mask = np.ones(len(row.response_ids), dtype=bool)
        mask[3:5] = False
        mask[-1] = number < 2
        tensors = {
            name: np.where(mask, rng.normal(-2, 0.3, len(mask)), 0).astype(np.float32)
            for name in ("old_log_probs", "advantages", "values", "returns")
        }
        rows.append(replace(row, tensors=tensors, trainable=mask))
    return rows


@pytest.fixture(scope="module")
def models():
    return pair("Qwen2", SMALL)


def plain_loss(plain, rows: list[Row]) -> torch.Tensor:
    """Return the clipped policy loss of trainable tokens, summed token by token."""
    total = torch.zeros(())
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()
        found = plain(ids[None]).logits[0].float().log_softmax(-1)
        for t in np.flatnonzero(row.trainable):
            at = len(row.prompt_ids) + int(t)
            ratio = (found[at - 1, ids[at]] - float(row.tensors["old_log_probs"][t])).exp()
            advantage = float(row.tensors["advantages"][t])
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            total = total + (torch.minimum(loss, torch.tensor(-advantage * 3.0)) if advantage < 0 else loss)
    return total


def assert_loss_and_gradients(models, rows: list[Row], kept: list[Row], layout) -> dict[str, torch.Tensor]:
    """Compare the loss of `rows` and its gradients with those of `kept` in a plain model; return the loss sums."""
    model, plain = models
    plain.zero_grad()
    expected = plain_loss(plain, kept)
    expected.backward()
    model.zero_grad()
    loss, sums = actor_loss(Config(), model, collate(rows, **layout))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        expected_grad = plain.get_parameter(name).grad
        assert (parameter.grad - expected_grad).norm() <= 1e-5 * (1 + expected_grad.norm()), name
    return sums


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_trainable_tokens_have_gradients(models, layout):
    assert_loss_and_gradients(models, episodes(), episodes(), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masked_responses_have_no_gradient_and_do_not_count(models, layout):
    rows = episodes()
    kept, masked = [rows[0], rows[2]], rows[1]
    for row in rows:
        row.tensors["loss_mask"] = np.full(len(row.response_ids), row is not masked, np.float32)
    sums = assert_loss_and_gradients(models, rows, kept, layout)
    _, alone = actor_loss(Config(), models[0], collate(kept, **layout))
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {name: float(value) for name, value in alone.items()}, rel=1e-5
    )
    lengths = [row.trained_tokens("actor") for row in rows]
    assert lengths == [kept[0].length, 0, kept[1].length] and masked.trained_tokens("critic") == masked.length
    assert loss_divisor(lengths, "token-mean") == sum(lengths) and loss_divisor(lengths, "seq-mean-token-mean") == 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch.no_grad()
def test_log_probs_of_trainable_tokens_include_observations_as_context(models, layout):
    # Log-probs are 0 at tokens that are not trainable.
    model, rows = models[0], episodes()
    batch, all_tokens = collate(rows, **layout), collate([replace(row, trainable=None) for row in rows], **layout)
    found = batch.split(log_probs(Config(), model, batch))
    everything = all_tokens.split(log_probs(Config(), model, all_tokens))
    for row, some, every in zip(rows, found, everything, strict=True):
        np.testing.assert_allclose(some, np.where(row.trainable, every, 0), atol=1e-6)


def test_a_filler_of_a_row_with_observations_has_a_trainable_token():
    rows = episodes()
    rows[0].trainable[0] = False
    ((filler,),) = fill([[Share(())]], rows)
    assert filler.weight == 0
    assert collate(filler.rows, True).mask.sum() == 1


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_advantages_are_independent_of_observations(estimator):
    # An observation between two tokens changes the advantages of neither.
    keys = dict(algorithm__adv_estimator=estimator, algorithm__use_kl_in_reward=True, algorithm__lam=0.9)
    plain, with_observations = (groups([[1.0, 0.0], [0.3, 0.7]], [[4, 3], [2, 5]]) for _ in range(2))
    for group in with_observations:
        for sample in group.samples:
            count = len(sample.response.token_ids)
            mask = np.ones(count + 3, dtype=bool)
            mask[[1, 2, count + 2]] = False  # an observation within, and one at the end
            spread = lambda values, mask=mask: per_row(values, [mask])[0]  # noqa: E731
            tokens, scored = np.arange(len(mask), dtype=np.int32), spread(sample.response.log_probs)
            sample.response = replace(sample.response, token_ids=tokens, log_probs=scored, trainable=mask)
            sample.tensors = {name: spread(values) for name, values in sample.tensors.items()}
    metrics = [prepare_and_complete(Experience(config(**keys)), batch) for batch in (plain, with_observations)]
    assert metrics[0] == pytest.approx(metrics[1], nan_ok=True)
    for one, other in zip(plain, with_observations, strict=True):
        for sample, episode in zip(one.samples, other.samples, strict=True):
            mask = episode.response.mask
            assert (episode.response.length, len(mask)) == (len(sample.response.token_ids), sample.response.length + 3)
            for name in ("token_rewards", "advantages", "returns"):
                np.testing.assert_array_equal(episode.tensors[name][mask], sample.tensors[name], err_msg=name)
                assert not episode.tensors[name][~mask].any()
    logged = [sample_metrics(batch, batch, 2, 8, 16, 1) for batch in (plain, with_observations)]
    same = ("response_length/", "response/entropy", "critic/")
    for name in (name for name in logged[0] if name.startswith(same)):
        assert logged[0][name] == pytest.approx(logged[1][name]), name


def test_means_divide_by_trainable_tokens(models):
    rows = episodes()
    lengths = [row.length for row in rows]
    assert lengths == [len(row.response_ids) - masked for row, masked in zip(rows, (2, 2, 3), strict=True)]
    assert loss_divisor(lengths, "token-mean") == sum(lengths)
    flat = flattened([row.response_ids for row in rows], [row.mask for row in rows])
    assert flat.tolist() == collate(rows, True).targets.tolist()


def test_observations_of_an_evicted_sample_remain_context():
    first = Partial(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), 4, trainable=np.array([True, False, True]))
    more = first.extended(np.array([7], np.int32), np.array([-1.0], np.float32), 5)
    assert more.trainable.tolist() == [True, False, True, True] and more.weight_version == 4
    plain = Partial(np.empty(0, np.int32), np.empty(0, np.float32), -1)
    assert plain.extended(more.token_ids, more.log_probs, 5).trainable is None


@pytest.mark.parametrize("mask", [np.ones(2, int), np.ones(3, bool), np.zeros(2, bool)], ids=("int", "longer", "none"))
def test_an_invalid_mask_is_rejected(mask):
    with pytest.raises(ValueError, match=r"Response\.trainable: .* of 2 tokens set; it must be bool"):
        Response(np.arange(2, dtype=np.int32), np.zeros(2, np.float32), "stop", 0, "", mask)
