"""Messages about models that vLLM can't serve, and agreement with vLLM's own tables."""

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
    """Return the configuration of a model without weights: 8 attention heads of size 32, 4 key-value heads."""
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


def test_supported_model_is_accepted(config):
    assert unsupported_reasons(config) == []
    change(config, sliding_window=128, use_sliding_window=True, max_window_layers=1)
    assert unsupported_reasons(config) == []


def test_unsupported_head_size_is_only_reported_on_cpus(config):
    change(config, hidden_size=128)
    (problem,) = unsupported_reasons(config)
    assert problem == (
        f"model.path={config.model.path}: its attention head size is 16, but vLLM on CPUs supports "
        "32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512; choose another model, a machine with GPUs, or "
        "rollout.name=transformers"
    )
    config.reward.functions = [{"path": "judge", "kwargs": {"model": config.model.path}}]
    judge = problem.replace("model.path=", "reward.functions: model=").removesuffix(", or rollout.name=transformers")
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
    (problem,) = unsupported_reasons(config)
    key, value = next(iter(changes.items()))
    assert problem.startswith(f"{key}={value}: {words}") and "set " in problem
    assert unplannable_reasons(config, device) == ([] if "not installed" in problem else [problem]), (
        "a planned machine may have other packages"
    )


def test_latent_attention_needs_gpus(config):
    change(config, kv_lora_rank=32)
    (problem,) = unsupported_reasons(config)
    assert "compute latent attention differently from transformers" in problem
    config.cluster.device = "cuda"
    assert unsupported_reasons(config) == []


def test_reward_models_are_not_served_on_cpus_of_gpu_machines(config):
    config.reward.model_path, config.reward.model_backend, config.reward.device = "m", "vllm", "cpu"
    assert unsupported_judge_reasons(config) == []
    config.cluster.device = "cuda"
    (problem,) = unsupported_judge_reasons(config)
    assert problem.startswith("reward.device=cpu: in this job vLLM serves judges and reward models on GPUs")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("bloom", "vLLM computes its exact GELU"),
        ("gpt_oss", "vLLM would keep some initial weights of a gpt_oss"),
    ],
)
def test_models_whose_weight_updates_vllm_ignores_are_not_trained(config, kind, words):
    AutoConfig.for_model(kind).save_pretrained(config.model.path)
    config.cluster.device = "cuda"
    (problem,) = set(unsupported_reasons(config)) - set(unsupported_reasons(config, trains=False))
    assert problem.startswith(f"model.path={config.model.path}: {words}") and "choose another model" in problem
    assert unplannable_reasons(config, "cpu") == unplannable_reasons(config, "cuda") == [problem]
    config.rollout.on_mismatch = "alert"
    assert (problem in unsupported_reasons(config)) == (kind == "gpt_oss")


def test_unknown_architecture_is_reported_unless_the_transformers_backend_runs_it(config):
    change(config, architectures=["XLNetLMHeadModel"])
    (problem,) = unsupported_reasons(config)
    assert "vLLM has no architecture XLNetLMHeadModel, and can't run it with its transformers" in problem
    change(config, architectures=["HeliumForCausalLM"])
    assert "HeliumForCausalLM" not in architectures() and unsupported_reasons(config) == []


@pytest.mark.parametrize(("width", "fits", "instead"), [(2, True, 0), (8, True, 0), (3, False, 2), (6, False, 4)])
def test_key_value_heads_are_partitioned_or_replicated(config, width, fits, instead):
    config.rollout.tensor_model_parallel_size = width
    problems = unsupported_reasons(config)
    assert fits or f"must divide the 4 key-value heads of {config.model.path}" in problems[0]
    assert bool(problems) != fits and (
        fits or problems[0].endswith(f"set rollout.tensor_model_parallel_size={instead}")
    )


def test_engine_kwargs_are_checked_against_limits(config):
    config.rollout.engine_kwargs = {"block_size": 48, "max_model_len": 2048}
    length, block = unsupported_reasons(config)
    assert "max_model_len=2048: must be at most 1024, the context of" in length
    assert "block_size=48: must be a multiple of 32 on CPUs; set 32, or leave it out" in block
    change(config, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    config.rollout.engine_kwargs = {"block_size": 64, "max_model_len": 2048}
    assert unsupported_reasons(config) == []


def test_longer_max_model_len_is_accepted_if_another_key_allows_it(config, monkeypatch):
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


def test_unusual_configurations_are_reported_or_left_to_vllm(config):
    change(config, num_attention_heads=0)
    assert unsupported_reasons(config) == []
    change(config, num_attention_heads=8, architectures=["AutoModelForCausalLM"])
    assert "vLLM has no architecture AutoModelForCausalLM" in unsupported_reasons(config)[0]
    change(config, num_key_value_heads=[4, 2])
    assert unsupported_reasons(config) == [] and "num_key_value_heads" in training_problems(config)[0]


@pytest.mark.slow
def test_limits_match_vllm_tables():
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
def test_vllm_kernel_accepts_exactly_the_listed_head_sizes(dtype):
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    accepted = set()
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
            accepted.add(size)
    assert accepted == {*CPU_HEAD_SIZES}
