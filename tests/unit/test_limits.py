"""What is said of models that vLLM can't serve, and that vLLM says the same."""

import importlib.util
import json
from contextlib import suppress
from functools import reduce

import pytest
import torch
from transformers import AutoConfig, Qwen2Config

from rlfuse.config.schema import Config
from rlfuse.engines.trainer.families import training_problems
from rlfuse.engines.vllm.support import (
    CPU_BLOCK,
    CPU_HEAD_SIZES,
    architectures,
    unplannable_reasons,
    unsupported_judge_reasons,
    unsupported_reasons,
)


@pytest.fixture
def config(tmp_path):
    """Of a model without weights: 8 heads of 32 numbers, 4 of keys."""
    model = Qwen2Config(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024)
    model.architectures = ["Qwen2ForCausalLM"]
    model.save_pretrained(tmp_path)
    config = Config()
    config.model.path, config.cluster.device = str(tmp_path), "cpu"
    return config


def change(config, **values):
    path = f"{config.model.path}/config.json"
    with open(path) as file:
        model = json.load(file) | values
    with open(path, "w") as file:
        json.dump(model, file)


def test_a_model_that_vllm_serves_is_accepted(config):
    assert unsupported_reasons(config) == []
    change(config, sliding_window=128, use_sliding_window=True, max_window_layers=1)
    assert unsupported_reasons(config) == []


def test_a_head_that_vllm_has_no_kernel_for_is_told_on_cpus_alone(config):
    change(config, hidden_size=128)
    (told,) = unsupported_reasons(config)
    assert told == (
        f"model.path={config.model.path}: its attention head size is 16, but vLLM on CPUs supports "
        "32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512; choose another model, a machine with GPUs, or "
        "rollout.name=transformers"
    )
    config.reward.functions = [{"path": "judge", "kwargs": {"model": config.model.path}}]
    judge = told.replace("model.path=", "reward.functions: model=").removesuffix(", or rollout.name=transformers")
    assert unsupported_judge_reasons(config) == [judge]
    config.cluster.device = "cuda"
    assert unsupported_reasons(config) == []
    config.cluster.device, config.cluster.ray_address = "auto", "auto"  # the cluster decides
    assert unsupported_reasons(config) == []


@pytest.mark.parametrize(
    "changes, device, words",
    [
        ({"rollout.kv_transfer": "nixl"}, "cuda", "on GPUs a sleeping engine frees the memory"),
        ({"rollout.kv_transfer": "nixl"}, "cpu", "the package nixl is not installed"),
        ({"fusion.tail_speculation": 2, "rollout.draft": "history"}, "cpu", "must be 0 with rollout.draft=history"),
        (
            {"rollout.draft": "history", "rollout.engine_kwargs": {"speculative_config": {}}},
            "cuda",
            "conflicts with rollout.engine_kwargs.speculative_config",
        ),
        (
            {"fusion.tail_speculation": 2, "rollout.engine_kwargs": {"pipeline_parallel_size": 2}},
            "cuda",
            "conflicts with rollout.engine_kwargs.pipeline_parallel_size",
        ),
        (
            {"fusion.tail_speculation": 2, "rollout.engine_kwargs": {"logits_processors": ["m:Processor"]}},
            "cpu",
            "conflicts with rollout.engine_kwargs.logits_processors",
        ),
        ({"rollout.draft": "suffix", "fusion.tail_speculation": 2}, "cuda", "vLLM has no suffix decoding"),
        ({"rollout.draft": "suffix", "fusion.tail_speculation": 2}, "cpu", "the package arctic-inference is not inst"),
    ],
    ids=str,
)
def test_settings_that_vllm_cannot_honour_are_refused(config, monkeypatch, changes, device, words):
    found, missing = importlib.util.find_spec, ("nixl", "arctic_inference")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    config.cluster.device = device
    for key, value in changes.items():
        *groups, leaf = key.split(".")
        setattr(reduce(getattr, groups, config), leaf, value)
    (told,) = unsupported_reasons(config)
    key, value = next(iter(changes.items()))
    assert told.startswith(f"{key}={value}: {words}") and "set " in told
    assert unplannable_reasons(config, device) == ([] if "not installed" in told else [told]), (
        "a plan's machine has its own"
    )


def test_latent_attention_needs_gpus(config):
    change(config, kv_lora_rank=32)
    (told,) = unsupported_reasons(config)
    assert "compute latent attention differently from transformers" in told
    config.cluster.device = "cuda"
    assert unsupported_reasons(config) == []


def test_models_of_rewards_are_not_served_on_cpus_of_machines_with_gpus(config):
    config.reward.model_path, config.reward.model_backend, config.reward.device = "m", "vllm", "cpu"
    assert unsupported_judge_reasons(config) == []
    config.cluster.device = "cuda"
    (told,) = unsupported_judge_reasons(config)
    assert told.startswith("reward.device=cpu: in this job vLLM serves judges and reward models on GPUs")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("bloom", "vLLM computes its exact GELU"),
        ("gpt_oss", "vLLM would keep some initial weights of a gpt_oss"),
    ],
)
def test_models_whose_new_weights_vllm_does_not_compute_with_are_not_trained(config, kind, words):
    AutoConfig.for_model(kind).save_pretrained(config.model.path)
    config.cluster.device = "cuda"
    (told,) = set(unsupported_reasons(config)) - set(unsupported_reasons(config, trains=False))
    assert told.startswith(f"model.path={config.model.path}: {words}") and "choose another model" in told
    assert unplannable_reasons(config, "cpu") == unplannable_reasons(config, "cuda") == [told]
    config.rollout.on_mismatch = "alert"
    assert (told in unsupported_reasons(config)) == (kind == "gpt_oss")


def test_an_architecture_that_vllm_has_not_is_told_unless_it_runs_transformers_own(config):
    change(config, architectures=["XLNetLMHeadModel"])
    (told,) = unsupported_reasons(config)
    assert "vLLM has no architecture XLNetLMHeadModel, and can't run it with its transformers" in told
    change(config, architectures=["HeliumForCausalLM"])
    assert "HeliumForCausalLM" not in architectures() and unsupported_reasons(config) == []


@pytest.mark.parametrize(("width", "fits", "instead"), [(2, True, 0), (8, True, 0), (3, False, 2), (6, False, 4)])
def test_key_value_heads_are_shared_out_or_repeated(config, width, fits, instead):
    config.rollout.tensor_model_parallel_size = width
    told = unsupported_reasons(config)
    assert fits or f"must divide the 4 key-value heads of {config.model.path}" in told[0]
    assert bool(told) != fits and (fits or told[0].endswith(f"set rollout.tensor_model_parallel_size={instead}"))


def test_what_goes_to_vllm_as_it_is_has_limits_too(config):
    config.rollout.engine_kwargs = {"block_size": 48, "max_model_len": 2048}
    length, block = unsupported_reasons(config)
    assert "max_model_len=2048: must be at most 1024, the context of" in length
    assert "block_size=48: must be a multiple of 32 on CPUs; set 32, or leave it out" in block
    change(config, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    config.rollout.engine_kwargs = {"block_size": 64, "max_model_len": 2048}
    assert unsupported_reasons(config) == []


def test_what_vllm_would_serve_by_another_key_is_not_refused(config, monkeypatch):
    config.rollout.engine_kwargs = {"max_model_len": 2048}
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}
    change(config, rope_parameters=ropes)
    assert unsupported_reasons(config) == []
    change(config, rope_parameters=None, model_max_length=4096)
    assert unsupported_reasons(config) == []
    change(config, model_max_length=None)
    assert len(unsupported_reasons(config)) == 1
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert unsupported_reasons(config) == []
    change(config, architectures=["Mine"])
    assert len(unsupported_reasons(config)) == 1
    config.rollout.engine_kwargs["hf_overrides"] = {"architectures": ["Qwen2ForCausalLM"]}
    assert unsupported_reasons(config) == []


def test_odd_configurations_are_told_or_left_to_vllm(config):
    change(config, num_attention_heads=0)
    assert unsupported_reasons(config) == []
    change(config, num_attention_heads=8, architectures=["AutoModelForCausalLM"])
    assert "vLLM has no architecture AutoModelForCausalLM" in unsupported_reasons(config)[0]
    change(config, num_key_value_heads=[4, 2])
    assert unsupported_reasons(config) == [] and "num_key_value_heads" in training_problems(config)[0]


@pytest.mark.slow
def test_vllm_s_own_tables_say_the_same():
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert architectures() == ModelRegistry.get_supported_archs()
    assert {*CPUAttentionBackend.get_supported_head_sizes()} <= {*CPU_HEAD_SIZES}
    assert CPUAttentionBackend.get_supported_kernel_block_sizes() == [MultipleOf(CPU_BLOCK)]
    assert CPUAttentionBackend.supports_sliding_window()
    assert {torch.float32, torch.bfloat16} <= {*CpuPlatform().supported_dtypes}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_s_kernel_takes_just_the_heads_that_are_listed(dtype):
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    taken = set()
    for size in range(4, 768, 4):
        with suppress(RuntimeError):
            ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1,
                num_heads=2,
                num_kv_heads=2,
                head_dim=size,
                seq_lens=torch.tensor([4], dtype=torch.int32),
                dtype=dtype,
                query_start_loc=torch.tensor([0, 4], dtype=torch.int32),
                causal=True,
                sliding_window_size=-1,
                isa=_get_attn_isa(dtype, CPU_BLOCK, size),
                enable_kv_split=False,
            )
            taken.add(size)
    assert taken == {*CPU_HEAD_SIZES}
