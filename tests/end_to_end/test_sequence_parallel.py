"""Sequences sharded over four real ranks give the passes, gradients and steps of whole sequences on one rank each."""

import asyncio
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import ray
import torch
from trainer_probe import (
    VOCABULARY,
    Probe,
    assert_skipping_changes_nothing,
    distance,
    lengths,
    make_rows,
    only_the_policy_loss,
    scores_of,
    settings,
)
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from rlfuse.engines.trainer.sequence_parallel_packing import Costs, Overhead
from rlfuse.samples import Embedding, Visual
from rlfuse.tasks.small_video_models import write_small_qwen3_vl, write_small_qwen25_vl
from rlfuse.video.embedding import write_rows
from rlfuse.video.models.base import embedding_width
from rlfuse.video.models.qwen3_vl import Qwen3VL
from rlfuse.video.plan import Geometry, VideoPlan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a model of four query and two key/value heads, which degree 4 has to repeat."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policy")
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.2,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def cut(folder, budget, largest=4, stage=1, mode="token-mean", **more):
    config = settings(folder, stage, mode, budget=budget, **more)
    config.trainer.n_gpus_per_node, config.training.ulysses_sequence_parallel_size = 4, largest
    return config


@pytest.fixture(scope="module")
async def group(folder, four_whole):
    group = await Probe.of(four_whole, cut(folder, budget=64))
    await group.measure()
    assert group.costs.pair > 0 and group.costs.overheads.keys() == {1, 2, 4}
    assert len(group.costs.slower) == 4 and group.costs.slower[3] >= group.costs.slower[0] == 1
    group.costs = Costs(
        overheads=dict.fromkeys((2, 4), Overhead(start=1e9))
    )  # use the smallest degree that a row needs
    return group


def long_rows(tokens, seed=0):
    """Return rows of these lengths, at most half of each is the response."""
    rng = np.random.default_rng(seed)

    def cut_to(row, size):
        kept = slice(0, size // 2)
        response, tensors = row.response_ids[kept], {name: array[kept] for name, array in row.tensors.items()}
        prompt = rng.integers(3, VOCABULARY, size - len(response)).astype(np.int32)
        return replace(row, prompt_ids=prompt, response_ids=response, tensors=tensors)

    return [cut_to(row, size) for row, size in zip(make_rows(len(tokens), seed), tokens, strict=True)]


async def everything(group, rows):
    """Return the results of all passes, gradients and steps of both models, and the spans with their degrees."""
    await group.drain()
    scores = [await scores_of(group, "actor", rows), await scores_of(group, "ref", rows)]
    metrics = await group.update("critic", rows) | await group.update("actor", rows)
    gradients = [await group.gradients(model) for model in ("critic", "actor")]
    scores += [await scores_of(group, "critic", rows), await scores_of(group, "actor", rows)]
    return scores, metrics, gradients, await group.drain()


def assert_same(found, expected, rows):
    for have, want in zip(found[0], expected[0], strict=True):
        assert [len(each) for each in have] == lengths(rows)
        # The float32 spacing of log-probs near -10 is 1e-6; a few of these are rounding.
        np.testing.assert_allclose(np.concatenate(have), np.concatenate(want), atol=1e-5, rtol=2e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    for have, want in zip(found[2], expected[2], strict=True):
        assert distance(have, want) < 1e-5
    for kind in ("old_log_prob", "ref", "values", "forward", "backward"):
        tokens, wanted = (sum(span.tokens for span in part[3] if span.kind == kind) for part in (found, expected))
        assert tokens == wanted > 0


LENGTHS = {2: [33, 21, 39, 35], 4: [77, 45, 50, 41], 1: [77, 31, 9, 11, 7, 39, 5, 10]}
"""Odd lengths that a budget of 20 shards over two ranks, over four, and (1) over four, two and one."""


@pytest.mark.parametrize(
    "degrees, stage, mode, packed",
    [
        ({2}, 0, "token-mean", True),
        ({4}, 1, "seq-mean-token-mean", False),
        ({1, 2, 4}, 2, "token-mean", True),
        ({1, 2, 4}, 3, "gspo", True),
    ],
)
async def test_sharded_rows_give_the_results_of_whole_rows(group, folder, degrees, stage, mode, packed):
    """Token and sequence losses, packed and padded.

    Activations are recomputed for padded rows, and by length for packed slices, consistently over their ranks.
    """
    rows, results = long_rows(LENGTHS[min(degrees)]), []
    for largest in (1, 4):
        config = cut(folder, 20, largest, stage, "seq-mean-token-mean" if mode == "gspo" else mode)
        config.actor.loss_mode = "gspo" if mode == "gspo" else "vanilla"
        config.model.use_remove_padding = packed
        config.model.enable_gradient_checkpointing = not packed
        config.model.enable_activation_offload, config.model.activation_device_mb = packed and largest > 1, 0
        await group.take(config)
        results.append(await everything(group, rows))
    assert_same(results[1], results[0], rows)
    assert {span.attributes["degree"] for span in results[1][3] if span.kind == "ref"} == degrees


@pytest.mark.parametrize("stage", [1, 3])
async def test_rows_without_advantage_can_be_skipped(group, folder, tmp_path, stage):
    config = only_the_policy_loss(cut(folder, 20, stage=stage, alone=True))
    await group.meet(config)
    await assert_skipping_changes_nothing(lambda: group.take(config), tmp_path)


async def test_a_prompt_runs_once_for_all_its_responses(group, folder):
    """On one rank and sharded: results and gradients equal those of separate rows, and each unique token runs once."""
    prompts = [row.prompt_ids for row in long_rows([45, 50, 48, 44], seed=5)]
    rows = [replace(row, prompt_ids=prompts[i % 4]) for i, row in enumerate(make_rows(20, seed=6))]
    unique = sum(map(len, prompts)) + sum(lengths(rows))
    await group.take(cut(folder, budget=100, largest=1))
    group.shares_prompts = False
    await asyncio.gather(
        *(rank.__ray_call__.remote(lambda rank: setattr(rank, "shares", False)) for rank in group.ranks)
    )
    expected = await everything(group, rows)
    group.shares_prompts = True
    for budget, largest in ((1000, 1), (100, 4)):
        await group.take(cut(folder, budget, largest))
        found = await everything(group, rows)
        assert_same(found, expected, rows)
        ran = sum(span.attributes["run"] for span in found[3] if span.kind == "ref")
        assert unique <= ran < unique + 4 * len(prompts)


@dataclass(frozen=True)
class Mapped:
    """Embeddings in a memory-mapped file."""

    key: str
    path: str
    tokens: int

    def read(self, first, last):
        whole = torch.from_file(self.path, size=self.tokens * 32, dtype=torch.float32).view(self.tokens, 32)
        return whole[first:last]


async def test_clip_embeddings_are_sharded_with_the_tokens(group, folder, tmp_path):
    """Embeddings of the model's tokens, read from files for placeholders, give the results of the tokens."""
    ray.cloudpickle.register_pickle_by_value(__import__(__name__))  # ranks can't import from tests
    table = Qwen2ForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()
    rows, shown = long_rows([77, 31, 40, 9]), []
    for row in rows:
        ids, at = row.prompt_ids.copy(), np.arange(1, len(row.prompt_ids) - 1, dtype=np.int32)
        table[row.prompt_ids[at]].numpy().tofile(tmp_path / row.id)
        ids[at] = 0
        source = Mapped(row.id, str(tmp_path / row.id), len(at))
        shown.append(replace(row, prompt_ids=ids, visual=(Visual(at, source),)))
    await group.take(cut(folder, budget=20))
    scored = [[await scores_of(group, "ref", each), await scores_of(group, "critic", each)] for each in (shown, rows)]
    for have, want in zip(*scored, strict=True):
        # The float32 spacing of log-probs near -10 is 1e-6; a few of these are rounding.
        np.testing.assert_allclose(np.concatenate(have), np.concatenate(want), atol=1e-5, rtol=2e-6)
    results = []
    for largest in (1, 4):
        await group.take(cut(folder, 20, largest))
        results.append(await everything(group, shown))
    assert_same(results[1], results[0], shown)
    assert {span.attributes["degree"] for span in results[1][3] if span.kind == "ref"} == {1, 2, 4}
    norms = []
    for each in (shown, rows):
        await group.take(cut(folder, budget=20))
        await group.accumulate(("actor",), each)
        norms.append((await group.step("actor", lengths(each)))["actor/grad_norm"])
    assert 0 < norms[0] < norms[1]  # tokens replaced by placeholders have no embedding gradient


@pytest.mark.parametrize(
    "write, patch, timestamps", [(write_small_qwen25_vl, 14, None), (write_small_qwen3_vl, 16, Qwen3VL.timestamps)]
)
async def test_multimodal_positions_are_sharded_with_the_tokens(group, tmp_path, write, patch, timestamps):
    """Also features fed into several layers: passes and gradients at every degree, shared prompts, ZeRO 1 and 3."""
    folder = write(tmp_path / "model")
    times, geometry = tuple(i / 5 for i in range(12)), Geometry(patch, temporal_patch=2)
    plan = VideoPlan(times, 4 * patch, 4 * patch, 5.0, 4, geometry, timestamps)
    width, places = embedding_width(AutoConfig.from_pretrained(folder)), np.arange(3, 27, dtype=np.int32)
    if timestamps:  # two tokens of text before each temporal patch but the first
        places += 2 * (np.arange(24, dtype=np.int32) // 4)
    prompts, rows = long_rows([44, 40]), make_rows(5, seed=8)
    for number, prompt in enumerate(prompts):
        (path := tmp_path / str(number)).touch()
        write_rows(str(path), 0, torch.randn(24, width, generator=torch.Generator().manual_seed(number)))
        source = Embedding(path.name, str(path), 24, width)
        ids, visual = np.concatenate([prompt.prompt_ids, prompt.response_ids]), (Visual(places, source, plan=plan),)
        for i in range(number, len(rows), 2):
            rows[i] = replace(rows[i], prompt_ids=ids, visual=visual)
    results = []
    for budget, largest, stage in ((1000, 1, 1), (45, 4, 1), (25, 4, 3)):
        await group.take(cut(str(folder), budget, largest, stage))
        results.append(await everything(group, rows))
        assert_same(results[-1], results[0], rows)
    degrees = [{span.attributes["degree"] for span in result[3] if span.kind == "ref"} for result in results]
    assert degrees == [{1}, {2}, {4}]


async def test_resumed_sharded_training_is_bitwise_equal(group, folder, tmp_path):
    rows = long_rows([77, 31, 9, 11])
    await group.take(cut(folder, 20, clip=1.0))
    await group.update("actor", rows)
    await group.save(tmp_path / "checkpoint")
    expected = [await group.update("actor", rows), await scores_of(group, "actor", rows)]
    await group.take(cut(folder, 20, clip=1.0))
    await group.load(tmp_path / "checkpoint")
    np.testing.assert_equal([await group.update("actor", rows), await scores_of(group, "actor", rows)], expected)


@pytest.mark.parametrize("stage, slot, budget", [(1, 0, 64), (3, None, 20)])
async def test_passes_in_one_call_are_bitwise_equal_to_separate_calls(group, folder, stage, slot, budget):
    rows, found = make_rows(9) if slot is not None else long_rows([77, 31, 9, 11]), []
    for joined in (True, False):
        await group.take(cut(folder, budget, stage=stage))
        scores, gained = {}, {}
        for models in [("actor", "ref", "critic")] if joined else [("actor",), ("ref",), ("critic",)]:
            scores |= await group.score(models, rows, slot)
        for models in [("critic", "actor")] if joined else [("critic",), ("actor",)]:
            gained |= await group.accumulate(models, rows, slot)
        for passes in (scores, gained):
            began = [each.began for each in passes.values()]
            assert began == sorted(set(began))
        metrics = [await group.step(model, lengths(rows)) for model in ("critic", "actor")]
        arrays = [np.concatenate(each.arrays) for each in scores.values()]
        found.append([arrays, metrics, *[await scores_of(group, model, rows) for model in ("actor", "critic")]])
        spans = [span for span in await group.drain() if span.samples]
        assert {span.kind for span in spans} >= {"old_log_prob", "ref", "values", "forward", "backward"}
    np.testing.assert_equal(*found)


async def test_a_single_slot_accepts_whole_rows_only(group, folder):
    short, long = long_rows([9, 77])
    await group.take(cut(folder, budget=20))
    assert group.lockstep and group.lockstep_backward
    scores = await asyncio.gather(*(scores_of(group, "actor", [short], slot) for slot in range(4)))
    for one, other in itertools.pairwise(scores):
        np.testing.assert_equal(one, other)
    with pytest.raises(ValueError, match=r"77 tokens exceeds .*len_per_gpu=20 and must be split.*slot 2 alone"):
        await scores_of(group, "actor", [long], slot=2)
