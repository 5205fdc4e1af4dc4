"""Qwen2.5-VL in the trainer: M-RoPE positions, language models without vision tower, and joined checkpoints."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import Clip
from transformers import (
    AutoModelForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
)

from rlfuse.config.schema import ModelConfig
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import (
    load_critic,
    load_policy,
    packs_exactly,
    response_logits,
    response_values,
)
from rlfuse.samples import Row, Visual
from rlfuse.tasks.small_video_models import SmallModel, write_small_qwen25_vl, write_small_video_llama3
from rlfuse.video.checkpoints import join_checkpoint
from rlfuse.video.models.base import m_rope
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.plan import Geometry, VideoPlan
from rlfuse.video.positions import MRope

SETTINGS = ModelConfig(dtype="float32")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    return write_small_qwen25_vl(tmp_path_factory.mktemp("models") / "whole", SmallModel(tied=request.param))


@pytest.fixture(scope="module")
def whole(folder):
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(str(folder), SETTINGS).eval()


def clip_at(start: int, grid: tuple[int, int, int], seconds: float, seed: int = 0) -> Visual:
    tokens = grid[0] * grid[1] * grid[2] // 4
    rows = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed))
    key = f"{grid}-{seconds}-{seed}"
    return Visual(np.arange(start, start + tokens, dtype=np.int32), Clip(key, rows), plan=plan_of(grid, seconds))


def plan_of(grid: tuple[int, int, int], seconds: float) -> VideoPlan:
    patches, height, width = grid
    times = tuple(i * seconds / 2 for i in range(2 * patches))
    level = height * width // 4
    return VideoPlan(times, 14 * height, 14 * width, 2 / seconds, level, Geometry(temporal_patch=2), timestamps=None)


def rope_index(model, size: int, clips: list[Visual]) -> np.ndarray:
    """Return the positions of transformers, computed in float64 as in vLLM."""
    kinds = np.zeros((1, size), np.int32)
    for clip in clips:
        kinds[0, clip.positions] = 2
    positions, _ = model.model.get_rope_index(
        torch.zeros(1, size, dtype=torch.int64),
        torch.from_numpy(kinds),
        video_grid_thw=torch.tensor([clip.plan.grid for clip in clips]),
        second_per_grid_ts=torch.tensor([clip.plan.seconds_per_temporal_patch for clip in clips], dtype=torch.float64),
    )
    return positions[:, 0].numpy()


SHORT, LONG = (2, 16, 8), (9, 4, 6)
"""Grids [T, H, W]: at 0.25 s per patch, the largest position of the first is in H, that of the second in T."""


@pytest.mark.parametrize("seconds", [0.25, 0.4, 1.0, 1.43])
@pytest.mark.parametrize("start", [0, 3])
def test_positions_match_transformers_up_to_the_end_of_a_long_clip(whole, start, seconds):
    rope = m_rope(whole.config)
    for grid in (SHORT, LONG):
        clip = clip_at(start, grid, seconds)
        size = start + len(clip.positions) + 5
        found, expected = rope.positions(size, [clip]), rope_index(whole, size, [clip])
        assert found.shape == (3, size) and found.dtype == np.int64
        np.testing.assert_array_equal(found[:, :-5], expected[:, :-5])
        largest = found[:, :-5].max()
        np.testing.assert_array_equal(found[:, -5:], np.tile(largest + 1 + np.arange(5), (3, 1)))
        if grid == SHORT and seconds == 0.25:
            np.testing.assert_array_equal(found, expected)
        if grid == LONG:
            assert (found[:, -5:] > expected[:, -5:]).all()


def test_positions_of_clips_and_text_are_consecutive(whole):
    clips = [clip_at(2, SHORT, 0.25), clip_at(70, SHORT, 0.25)]
    rope = m_rope(whole.config)
    np.testing.assert_array_equal(rope.positions(140, clips), rope_index(whole, 140, clips))
    np.testing.assert_array_equal(rope.positions(7, []), np.tile(np.arange(7), (3, 1)))
    example = MRope(2, 4.0).positions(7, [clip_at(2, (2, 4, 2), 0.5)])
    assert example.tolist() == [[0, 1, 2, 2, 4, 4, 5], [0, 1, 2, 3, 2, 3, 5], [0, 1, 2, 2, 2, 2, 5]]


def test_positions_after_a_long_clip_start_after_its_last_position(whole):
    """Follow vLLM; in transformers 5 they start earlier, see `positions`."""
    clips, rope = [clip_at(2, LONG, 1.0), clip_at(60, SHORT, 0.25)], m_rope(whole.config)
    found = rope.positions(130, clips)
    end = found[:, clips[0].positions].max()
    assert end == 2 + 8 * 4 and (found[:, 56:60] == end + 1 + np.arange(4)).all()
    alone = rope.positions(70, [clip_at(0, SHORT, 0.25)])
    np.testing.assert_array_equal(found[:, 60:], alone + end + 5)


def as_in_vllm(clip: Visual, offset: int) -> SimpleNamespace:
    """Return a clip or image in the form that vLLM's models receive."""
    seconds = torch.tensor(clip.plan.seconds_per_temporal_patch, dtype=torch.float64)
    data = {f"{clip.plan.modality}_grid_thw": torch.tensor(clip.plan.grid), "second_per_grid_ts": seconds}
    data = {name: SimpleNamespace(data=each) for name, each in data.items()}
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset), modality=clip.plan.modality, data=data)


@pytest.mark.slow
def test_positions_of_several_clips_match_vllm(whole):
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Served

    clips = [clip_at(2, LONG, 1.0), clip_at(60, SHORT, 0.25), clip_at(124, (3, 4, 6), 1.43), clip_at(150, LONG, 0.4)]
    served = SimpleNamespace(config=whole.config)
    served.iter_mm_grid_thw = partial(Served.iter_mm_grid_thw, served)
    features = [as_in_vllm(clip, int(clip.positions[0])) for clip in clips]
    expected, _ = Served.get_mrope_input_positions(served, [0] * 210, features)
    np.testing.assert_array_equal(m_rope(whole.config).positions(210, clips), expected)


def test_only_mrope_models_use_three_axes():
    assert m_rope(Qwen2Config()) is m_rope(VideoLlama3Config()) is None
    assert m_rope(Qwen2_5_VLConfig()) == MRope(2, 4)
    clip = clip_at(1, LONG, 0.4)  # without tokens per second, a temporal patch is one position
    assert MRope(2, None).positions(60, [clip])[0, clip.positions].max() == 1 + LONG[0] - 1


def test_clips_that_do_not_match_their_grid_are_refused():
    clip = clip_at(1, LONG, 1.0)
    for positions in (clip.positions[:-1], np.concatenate([clip.positions[:-1], [90]])):
        with pytest.raises(ValueError, match=r"grid \(9, 4, 6\) has 54 contiguous tokens, got 5[34] at positions"):
            MRope(2, 4.0).positions(100, [replace(clip, positions=positions)])


# Batches ---------------------------------------------------------------------------------------------------------


def example_rows(model, seed=0) -> list[Row]:
    """Return 3 responses about a long clip, 1 about a short clip, 2 to a text prompt, and 2 about two clips."""
    rng, rows = np.random.default_rng(seed), []
    shown = (3, [(LONG, 0.4)]), (1, [(SHORT, 1.0)]), (2, []), (2, [((3, 4, 6), 2.0), ((2, 8, 4), 0.4)])
    for number, (count, clips) in enumerate(shown):
        ids, visual, start = rng.integers(5, 200, 70).astype(np.int32), (), 4 + number
        for grid, seconds in clips:
            visual += (clip_at(start, grid, seconds, number),)
            start += len(visual[-1].positions) + 3
        for clip in visual:
            ids[clip.positions] = model.config.video_token_id
        rows += [Row(ids, rng.integers(5, 200, rng.integers(3, 12)).astype(np.int32), {}, "", visual)] * count
    return [replace(row, response_ids=row.response_ids[i % 3 :]) for i, row in enumerate(rows)]


def expected_logits(model, row: Row) -> torch.Tensor:
    """Return logits [T, V] of the whole Hugging Face model, one sequence at a time."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()
    table = model.get_input_embeddings()(ids)
    for clip in row.visual:
        table = table.index_copy(0, torch.from_numpy(clip.positions).long(), clip.source.read())
    at = m_rope(model.config).positions(len(ids), row.visual)
    logits = model(inputs_embeds=table[None], position_ids=torch.from_numpy(at)[:, None]).logits[0]
    return logits[len(row.prompt_ids) - 1 : -1]


@pytest.mark.parametrize("way", [dict(packed=True), dict(packed=False), dict(packed=True, shared=True)])
def test_logits_and_gradients_match_the_whole_model(whole, policy, way):
    assert attends_by_layout(policy) and packs_exactly(policy, 200, torch.float32, "cpu")
    rows, hidden = example_rows(whole), [whole.config.image_token_id, whole.config.video_token_id]
    seen = torch.ones(whole.config.text_config.vocab_size, dtype=torch.bool)
    seen[hidden] = False
    expected = torch.cat([expected_logits(whole, row) for row in rows])[:, seen]
    batch = collate(rows, **way, rope=m_rope(policy.config))
    assert batch.inputs["position_ids"].shape == (3, *batch.inputs["input_ids"].shape)
    found = response_logits(policy, batch)[:, seen]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for model, logits in ((whole, expected), (policy, found)):
        model.zero_grad()
        logits.sin().sum().backward()
    for name, parameter in policy.named_parameters():
        wanted = whole.get_parameter(name).grad
        assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm()


def test_text_batches_use_one_position_axis(whole, policy):
    rows = [row for row in example_rows(whole) if not row.visual]
    batch, plain = (collate(rows, True, rope=rope) for rope in (m_rope(policy.config), None))
    assert torch.equal(batch.inputs["position_ids"], plain.inputs["position_ids"])
    with torch.no_grad():
        alone = torch.cat([expected_logits(whole, row) for row in rows])
        found = response_logits(policy, batch)
    torch.testing.assert_close(found[:, :200], alone[:, :200], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", [dict(packed=True), dict(packed=False), dict(packed=True, shared=True)])
def test_slices_have_the_positions_of_the_whole_batch(whole, way):
    rows, rope = example_rows(whole), m_rope(whole.config)
    parts = [SimpleNamespace(degree=2, index=index, attend=None) for index in range(2)]
    cut = [collate(rows, **way, part=part, rope=rope).inputs["position_ids"] for part in parts]
    joined = torch.cat(cut, -1)
    expected = collate(rows, **way, rope=rope).inputs["position_ids"]
    assert joined.shape[-1] - expected.shape[-1] in (0, 1)
    assert torch.equal(joined[..., : expected.shape[-1]], expected)


# Loading and joining -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_language_models_load_without_tower_from_both_naming_schemes(folder, whole, policy, tmp_path):
    assert not [name for name in policy.state_dict() if "visual" in name]
    assert set(policy.state_dict()) < set(whole.state_dict())
    whole.config.save_pretrained(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    newer = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    names = {name: f"model.{name}" if name.startswith("visual") else name for name in newer}
    save_file({names[name]: tensor for name, tensor in newer.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (folder, tmp_path):
        for load in (load_policy, load_critic):
            found = load(str(path), SETTINGS).model.state_dict()
            for name, tensor in policy.model.state_dict().items():
                assert torch.equal(found[name], tensor)


@pytest.mark.slow
def test_critic_is_the_language_model_with_a_value_head(folder, whole, tmp_path):
    critic = load_critic(str(folder), SETTINGS).eval()
    assert attends_by_layout(critic) and not critic.score.weight.any()
    rows = example_rows(whole)
    with torch.no_grad():
        critic.score.weight.normal_()
        head, inputs = whole.lm_head, []
        hook = head.register_forward_pre_hook(lambda _, hidden: inputs.append(hidden[0][0]))
        for row in rows:
            expected_logits(whole, row)
        hook.remove()
        hidden = [x[len(row.prompt_ids) - 1 : -1] for x, row in zip(inputs, rows, strict=True)]
        expected = critic.score(torch.cat(hidden))[:, 0]
        for way in (dict(packed=True), dict(packed=False), dict(packed=True, shared=True)):
            found = response_values(critic, collate(rows, **way, rope=m_rope(critic.config)))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    critic.save_pretrained(tmp_path)
    again = load_critic(str(tmp_path), SETTINGS)
    assert torch.equal(again.score.weight, critic.score.weight)


def trained(model, path):
    """Modify all parameters and save the model; return its state dict."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9).add_(0.01)
    model.save_pretrained(path)
    return model.state_dict()


def assert_joined(out, folder, model_class, state):
    """Assert that `out` has the trained language model and the original tower."""
    found, info = model_class.from_pretrained(out, output_loading_info=True)
    before = model_class.from_pretrained(folder).state_dict()
    assert not info["missing_keys"] and not info["unexpected_keys"]
    text = {name.replace("language_model.", ""): tensor for name, tensor in state.items()}
    for name, tensor in found.state_dict().items():
        expected = text.pop(name.replace("language_model.", ""), None)
        if expected is None:
            assert torch.equal(tensor, before[name]) and ("vision" in name or "visual" in name or "projector" in name)
        else:
            assert torch.equal(tensor, expected) and not torch.equal(tensor, before[name])
    assert not text
    assert {file.name for file in out.iterdir()} == {file.name for file in folder.iterdir()}


@pytest.mark.slow
def test_trained_language_model_is_joined_with_the_tower(folder, tmp_path):
    state = trained(load_policy(str(folder), SETTINGS), tmp_path / "text")
    with pytest.raises(ValueError, match=r"not the text part of .*unknown"):
        join_checkpoint(folder, tmp_path / "text", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = join_checkpoint(tmp_path / "text", folder, tmp_path / "out")
    assert_joined(out, folder, Qwen2_5_VLForConditionalGeneration, state)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_trained_videollama3_text_part_is_joined_with_a_sharded_checkpoint(tied, tmp_path):
    folder = write_small_video_llama3(tmp_path / "whole", SmallModel(tied=tied))
    whole = VideoLlama3ForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    text = AutoModelForCausalLM.from_pretrained(VideoLlama3.export(folder, tmp_path / "text"))
    state = trained(text, tmp_path / "trained")
    out = join_checkpoint(tmp_path / "trained", folder, tmp_path / "out")
    assert_joined(out, folder, VideoLlama3ForConditionalGeneration, state)
    other = write_small_video_llama3(tmp_path / "other", SmallModel(heads=2, tied=tied))
    with pytest.raises(ValueError, match="different shape"):
        join_checkpoint(tmp_path / "trained", other, tmp_path / "out2")
