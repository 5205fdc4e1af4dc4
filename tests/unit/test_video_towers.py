"""Features of a separate vision tower equal those of the complete Hugging Face model with its processor."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen3VLForConditionalGeneration,
    VideoLlama3ForConditionalGeneration,
)

from rlfuse.tasks.small_video_models import (
    VIDEO,
    SmallModel,
    write_small_qwen3_vl,
    write_small_video_llama3,
)
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.towers import Tower

pytest.importorskip("torchvision", reason="the processors of the models need it")


@pytest.fixture(scope="module")
def video_llama3(tmp_path_factory):
    return write_small_video_llama3(tmp_path_factory.mktemp("models") / "video_llama3")


@pytest.fixture(scope="module")
def qwen25_vl(tmp_path_factory):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLVideoProcessor

    folder = tmp_path_factory.mktemp("models") / "qwen25_vl"
    text = {
        "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
        "window_size": 56, "fullatt_block_indexes": [1], "initializer_range": 0.1,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    Qwen2VLVideoProcessor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory):
    return write_small_qwen3_vl(tmp_path_factory.mktemp("models") / "qwen3_vl")


def frames(count, height=56, width=84, seed=0):
    return torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=_generator(seed))


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


@pytest.mark.slow
@torch.no_grad()
def test_features_and_pixels_equal_those_of_video_llama3(video_llama3):
    from transformers import VideoLlama3VideoProcessor

    clip, tower = frames(5), Tower(video_llama3)
    processor = VideoLlama3VideoProcessor.from_pretrained(video_llama3)
    inputs = processor(videos=[clip.permute(0, 3, 1, 2)], do_resize=False, return_tensors="pt")
    patches, grid = tower._patches(tower.pixels.normalise(clip), 2)
    assert torch.equal(patches, inputs["pixel_values_videos"])
    assert torch.equal(grid, inputs["video_grid_thw"])
    model = VideoLlama3ForConditionalGeneration.from_pretrained(video_llama3)
    names = {"pixel_values_videos", "video_grid_thw", "video_merge_sizes"}
    expected = model.get_video_features(**{name: inputs[name] for name in names}).pooler_output[0]
    features = tower.encode(clip)
    assert features.shape == expected.shape == (5 * 2 * 3, tower.shape.hidden)
    assert largest(features - expected) < 1e-5 < largest(expected)


@torch.no_grad()
@pytest.mark.parametrize("count", [4, 5])  # the last frame of an odd number is repeated
def test_features_equal_those_of_qwen25_vl(qwen25_vl, count):
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLVideoProcessor

    clip = frames(count, 84, 112)  # windows of 2 x 2 tokens that do not fit evenly
    inputs = Qwen2VLVideoProcessor.from_pretrained(qwen25_vl)(
        videos=[clip.permute(0, 3, 1, 2)], do_resize=False, return_tensors="pt"
    )
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen25_vl)
    names = ("pixel_values_videos", "video_grid_thw")
    expected = model.get_video_features(**{name: inputs[name] for name in names}).pooler_output[0]
    features = Tower(qwen25_vl).encode(clip)
    assert features.shape == expected.shape == (-(-count // 2) * 3 * 4, 64)
    assert largest(features - expected) < 1e-5 < largest(expected)


@torch.no_grad()
@pytest.mark.parametrize("count", [4, 5])
def test_features_of_all_layers_equal_those_of_qwen3_vl(qwen3_vl, count):
    """Check a grid that the position embeddings of the tower have to be interpolated to."""
    from transformers import Qwen3VLVideoProcessor

    clip = frames(count, 96, 160)
    inputs = Qwen3VLVideoProcessor.from_pretrained(qwen3_vl)(
        videos=[clip.permute(0, 3, 1, 2)], do_resize=False, do_sample_frames=False, return_tensors="pt"
    )
    model = Qwen3VLForConditionalGeneration.from_pretrained(qwen3_vl)
    seen = model.get_video_features(**{name: inputs[name] for name in ("pixel_values_videos", "video_grid_thw")})
    expected, tower = [seen.pooler_output[0], *(level[0] for level in seen.deepstack_features)], Tower(qwen3_vl)
    features = tower.encode(clip)
    assert features.shape == (-(-count // 2) * 3 * 5, tower.shape.hidden) and tower.shape.hidden == 3 * 128
    for found, level in zip(features.split(128, dim=1), expected, strict=True):
        assert largest(found - level) < 1e-5 < largest(level)


@pytest.mark.parametrize("model, step", [("video_llama3", 1), ("video_llama3", 3), ("qwen25_vl", 2), ("qwen3_vl", 2)])
def test_encoding_in_parts_is_bitwise_equal_to_the_complete_clip(model, step, request):
    height, width = (128, 96) if model == "qwen3_vl" else (140, 84)
    tower, clip = Tower(request.getfixturevalue(model), step=step), frames(11, height, width)
    full, cut = tower.encode(clip), tower.shape.cut
    for places in ([cut], [cut, 2 * cut], [cut * (10 // cut)]):
        assert torch.equal(torch.cat([tower.encode(part) for part in clip.tensor_split(places)]), full)


def test_towers_are_frozen_unless_trainable(video_llama3):
    clip = frames(2)
    assert not Tower(video_llama3).encode(clip).requires_grad
    trained = Tower(video_llama3, trainable=True)
    trained.encode(clip).sum().backward()
    assert all(weight.grad is not None for weight in trained.module.projector.parameters())


@pytest.mark.slow
def test_version_follows_weights_precision_and_updates(video_llama3, tmp_path):
    other = write_small_video_llama3(tmp_path / "other", SmallModel(seed=1))
    versions = [Tower(video_llama3).version, Tower(other).version, Tower(video_llama3, dtype="bfloat16").version]
    assert len(set(versions)) == 3
    tower, new = Tower(video_llama3), Tower(other)
    assert tower.version == versions[0]
    save_file({f"model.{name}": tensor for name, tensor in new.module.state_dict().items()}, tmp_path / "new")
    tower.update(tmp_path / "new", 7)
    assert tower.version == versions[0] + "+7"
    assert torch.equal(tower.encode(frames(1)), new.encode(frames(1)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SmallModel(tied=True), SmallModel(heads=8)])
@torch.no_grad()
def test_the_exported_language_model_equals_that_of_the_model(sizes, tmp_path):
    folder = write_small_video_llama3(tmp_path / "whole", sizes)
    text = AutoModelForCausalLM.from_pretrained(VideoLlama3.export(folder, tmp_path / "text"))
    assert (type(text).__name__, text.config.tie_word_embeddings) == ("Qwen2ForCausalLM", sizes.tied)
    full = VideoLlama3ForConditionalGeneration.from_pretrained(folder)
    embeddings = torch.randn(1, 9, text.config.hidden_size, generator=_generator(0))
    assert torch.equal(text(inputs_embeds=embeddings).logits, full(inputs_embeds=embeddings).logits)
    text_input = "[1.5 second] Größe\n?"
    for tokenizer in map(AutoTokenizer.from_pretrained, (folder, tmp_path / "text")):
        assert tokenizer.decode(tokenizer(text_input).input_ids) == text_input
        assert tokenizer(f"a{VIDEO}").input_ids[-1] == full.config.video_token_id


@pytest.mark.parametrize(
    "wrong, message",
    [(frames(0), "F >= 1"), (frames(1).float(), "uint8"), (frames(1, 30), "30x84 pixels.*multiples of 28")],
)
def test_invalid_frames_are_rejected(video_llama3, wrong, message):
    with pytest.raises(ValueError, match=message):
        Tower(video_llama3).encode(wrong)


def test_invalid_model_folders_are_rejected(video_llama3, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Tower(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"qwen2 model.*qwen2_5_vl, qwen3_vl, video_llama_3"):
        Tower(tmp_path)
    other = write_small_video_llama3(tmp_path / "other", SmallModel(tower_layers=1))
    (other / "config.json").write_bytes((video_llama3 / "config.json").read_bytes())
    with pytest.raises(ValueError, match="16 tensors missing"):
        Tower(other)
    (other / "video_preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no processor configuration"):
        Tower(other)
