"""How clip embeddings are passed to vLLM per model family; the trainer gives placeholder tokens probability 0."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen2VLConfig,
    Qwen3VLConfig,
    VideoLlama3Config,
)

from rlfuse.config.schema import ModelConfig
from rlfuse.engines.trainer.models import packs_exactly, prepare_for_training
from rlfuse.engines.vllm.prompts import Prompts, prompt_arguments
from rlfuse.samples import Embedding, Visual
from rlfuse.video.models.base import Route
from rlfuse.video.models.qwen3_vl import Qwen3VL
from rlfuse.video.placeholders import placeholder_ids
from rlfuse.video.plan import SEED_TIMES, Geometry, VideoPlan
from rlfuse.video.vllm_route import Refusal, select_route

PAIRS = Geometry(temporal_patch=2)
AT_TWO = VideoPlan((0.0, 0.5, 1.0, 1.5), 28, 56, 2.0, 2, PAIRS, timestamps=None)
TEXT = Qwen2Config(image_token_id=5, video_token_id=6)


@pytest.mark.parametrize(
    "config, plan, route",
    [
        (TEXT, replace(AT_TWO, geometry=Geometry(), timestamps=SEED_TIMES), Route.PROMPT_EMBEDS),
        (Qwen2_5_VLConfig(), AT_TWO, Route.VIDEO_EMBEDS),
        (Qwen2_5_VLConfig(), None, Route.VIDEO_EMBEDS),
        (Qwen3VLConfig(), replace(AT_TWO, timestamps=Qwen3VL.timestamps), Route.VIDEO_EMBEDS),
        (Qwen3VLConfig(), replace(AT_TWO, is_image=True), Route.VIDEO_EMBEDS),
    ],
)
def test_route_into_the_engine(config, plan, route):
    assert select_route(config, plan) is route


@pytest.mark.parametrize(
    "config, plan, reason",
    [
        (Qwen2Config(), AT_TWO, "no visual placeholder.*image_token_id"),
        (VideoLlama3Config(), AT_TWO, "text part of a video_llama_3 model: export it"),
        (
            Qwen2_5_VLConfig(),
            replace(AT_TWO, timestamps=SEED_TIMES),
            "inserts clips of a qwen2_5_vl into the prompt: .*without timestamps",
        ),
        (
            Qwen2VLConfig(),
            AT_TWO,
            "qwen2_vl is not a supported video model.*supported are qwen2_5_vl, qwen3_vl, video_llama_3",
        ),
        (Qwen3VLConfig(), AT_TWO, "inserts clips of a qwen3_vl into the prompt: .*with the family's timestamps"),
        (Qwen3VLConfig(), replace(AT_TWO, timestamps=SEED_TIMES), "with the family's timestamps"),
        (LlavaConfig(), AT_TWO, "llava is not a supported video model.*qwen2_5_vl"),
    ],
)
def test_inexact_routes_are_refused_with_a_reason(config, plan, reason):
    refusal = select_route(config, plan)
    assert isinstance(refusal, Refusal) and re.search(reason, refusal.reason)


def test_engine_arguments_follow_the_route():
    assert prompt_arguments(Qwen2Config(), 512) == {}
    assert prompt_arguments(TEXT, 512) == {"enable_prompt_embeds": True}
    assert prompt_arguments(Qwen2_5_VLConfig(), 9000)["max_num_batched_tokens"] == 9000
    assert prompt_arguments(VideoLlama3Config(), 512) == {}
    prompts, video = Prompts(VideoLlama3Config(), 512), Visual(np.arange(4), path="clip.mp4", plan=AT_TWO)
    with pytest.raises(
        ValueError, match=r"sample 1/2/3: clip\.mp4 can't be passed to vLLM: .*text part of a video_llama_3"
    ):
        prompts.check("1/2/3", np.full(4, 151656), (video,))


def test_clips_longer_than_one_engine_step_are_refused():
    video = Visual(
        np.arange(4), Embedding("key", "/nowhere", 4, Qwen2_5_VLConfig().text_config.hidden_size), "clip.mp4", AT_TWO
    )
    ids = np.full(4, Qwen2_5_VLConfig().video_token_id)
    Prompts(Qwen2_5_VLConfig(), 4).check("1/2/3", ids, (video,))
    with pytest.raises(
        ValueError, match=r"4 visual tokens, but the engine's steps have at most 3; raise .*batched_tokens"
    ):
        Prompts(Qwen2_5_VLConfig(), 3).check("1/2/3", ids, (video,))


def test_placeholders_have_zero_probability_and_gradient_in_the_trainer():
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Qwen2Config(**sizes, num_key_value_heads=1, image_token_id=38, video_token_id=39)
    assert placeholder_ids(config) == (38, 39)
    model = prepare_for_training(Qwen2ForCausalLM(config), ModelConfig(path="", enable_gradient_checkpointing=False))
    probabilities = model(torch.arange(6)[None]).logits.softmax(-1)
    assert torch.equal(probabilities[..., 38:], torch.zeros(1, 6, 2))
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(1, 6))
    probabilities[..., :3].sum().backward()
    gradient = model.lm_head.weight.grad
    assert not gradient[38:].any() and gradient[:38].any()
    assert packs_exactly(model, 40, torch.float32, "cpu")


def test_value_models_of_video_policies_are_unchanged():
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Qwen2Config(**sizes, num_key_value_heads=1, image_token_id=38, num_labels=1)
    settings = ModelConfig(path="", enable_gradient_checkpointing=False)
    values = prepare_for_training(Qwen2ForTokenClassification(config), settings)(torch.arange(6)[None]).logits
    assert values.shape == (1, 6, 1) and values.isfinite().all()
