"""Weight updates of vLLM's layers, including kernels that store weights in a custom layout.

The tests run in one process without an engine: vLLM's model on the CPU, and buckets as the trainer writes them.
"""

import inspect
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rlfuse.config.documentation import by_name
from rlfuse.config.quantization import CPU_METHOD, EXPERTS_ONLY, VLLM_KEYS
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import ModelConfig
from rlfuse.engines.vllm.setup import engine_arguments
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.engines.weights.sync import check_pushable
from rlfuse.errors import EngineError
from rlfuse.tensor_files import map_tensors

pytestmark = pytest.mark.xdist_group("vllm")  # its import is slow: one process

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, initializer_range=0.3, num_experts_per_tok=2,
)  # fmt: skip


@contextmanager
def vllm_model(kind: str, config: transformers.PreTrainedConfig, folder, dtype: str, quantization: str | None = None):
    """Yield transformers' model, vLLM's model with other weights, and its `SharedMemoryTransfer`."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from rlfuse.engines.vllm.receiver import SharedMemoryTransfer

    torch.manual_seed(0)
    trained = getattr(transformers, kind)(config).to(getattr(torch, dtype)).eval()
    trained.save_pretrained(folder)
    arguments = EngineArgs(
        model=str(folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=32, quantization=quantization
    )
    settings, default = arguments.create_engine_config(), torch.get_default_dtype()
    with set_current_vllm_config(settings):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel()
        torch.set_default_dtype(trained.dtype)
        model = initialize_model(settings)
        torch.set_default_dtype(default)
        with Exporter(trained, 0).gathered([*Exporter(trained, 0).tensors]) as tensors:
            model.load_weights(tensors.items())
        if quantization:
            finalize_layerwise_processing(model, settings.model_config)
        process_weights_after_loading(model, settings.model_config, torch.device("cpu"))
        try:
            with torch.no_grad():
                yield trained, model, SharedMemoryTransfer(None, settings, torch.device("cpu"), model)
        finally:
            cleanup_dist_env_and_memory()


def push(trained, transfer, folder):
    """Push random weights in two buckets that split the layer."""
    for parameter in trained.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    exporter = Exporter(trained, 0)
    names, path = list(exporter.tensors), folder / "bucket.safetensors"
    transfer.start_weight_update()
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        exporter.write(part, path)
        transfer.receive_weights(SimpleNamespace(path=str(path)))
    transfer.finish_weight_update()


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tied, width", [("float32", False, 64), ("bfloat16", True, 40)])
def test_layers_compute_with_the_weights_of_the_last_push(dtype, tied, width, tmp_path):
    """Check experts (also of a width that their kernel pads), the head and a packed linear layer."""
    from vllm.forward_context import set_forward_context

    sizes = SMALL | {"intermediate_size": width}
    config = transformers.MixtralConfig(**sizes, num_local_experts=3, tie_word_embeddings=tied)
    with vllm_model("MixtralForCausalLM", config, tmp_path, dtype) as (trained, model, transfer):
        states = torch.randn(9, 32, dtype=trained.dtype)
        ours, theirs = trained.model.layers[0], model.model.layers[0]
        for _ in range(3):
            push(trained, transfer, tmp_path)
            with set_forward_context(None, transfer.vllm_config):
                experts = theirs.block_sparse_moe(states)
            found = [experts, theirs.self_attn.qkv_proj(states)[0]]
            found += [model.lm_head.quant_method.apply(model.lm_head, states), model.model.embed_tokens.weight]
            attention = ours.self_attn
            qkv = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
            expected = [ours.mlp(states[None])[0], states @ qkv.T]
            expected += [trained.lm_head(states), trained.model.embed_tokens.weight]
            for one, other in zip(found, expected, strict=True):
                close = 1e-5 if dtype == "float32" else 0.02
                torch.testing.assert_close(one, other, atol=close * float(other.abs().max()), rtol=0)


@pytest.mark.slow
def test_each_push_is_quantized_again(tmp_path):
    """Check the CPU method: scales per row of a weight and per token, matrix products by torch."""
    sizes = {**SMALL, "tie_word_embeddings": True}
    with vllm_model("Qwen2ForCausalLM", transformers.Qwen2Config(**sizes), tmp_path, "bfloat16", CPU_METHOD) as each:
        trained, model, transfer = each
        states, layer = torch.randn(9, 32, dtype=trained.dtype), model.model.layers[0].mlp.down_proj
        wide, expected = torch.randn(9, 64, dtype=trained.dtype), []
        for _ in range(3):
            push(trained, transfer, tmp_path)
            ours = trained.model.layers[0]
            expected.append(ours.mlp.down_proj(wide))
            scale = float(expected[-1].abs().max())
            torch.testing.assert_close(layer(wide)[0], expected[-1], atol=0.1 * scale, rtol=0)
            assert layer.weight.dtype == torch.float8_e4m3fn
            torch.testing.assert_close(
                model.lm_head.quant_method.apply(model.lm_head, states), trained.lm_head(states), atol=0.05, rtol=0.02
            )
        assert float((expected[1] - expected[2]).abs().max()) > 0.5 * scale, "each push has other weights"


@pytest.mark.slow
def test_vllm_quantizes_every_kind_at_load_and_at_each_reload():
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.quantization.online.base import _ONLINE_LINEAR_METHODS, _ONLINE_MOE_METHODS
    from vllm.model_executor.model_loader.reload import layerwise

    mark = "_already_called_process_weights_after_loading"
    assert f'delattr(layer, "{mark}")' in inspect.getsource(layerwise._layerwise_process)
    for kind in by_name()["rollout.quantization"].names:
        shorthand = _ONLINE_SHORTHANDS[kind]
        assert (shorthand.linear is None) == (kind == EXPERTS_ONLY)
        linear = [_ONLINE_LINEAR_METHODS[shorthand.linear.weight]] if shorthand.linear else []
        for method in (*linear, _ONLINE_MOE_METHODS[shorthand.moe.weight]):
            assert mark in inspect.getsource(method.process_weights_after_loading)


@pytest.mark.slow
def test_routers_and_vision_towers_are_not_quantized(tmp_path):
    # vLLM passes the quantization to the routers of Qwen3-MoE and LFM2-MoE and to all towers.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    transformers.Qwen3MoeConfig(**SMALL).save_pretrained(tmp_path)
    for kind in {*by_name()["rollout.quantization"].names} - {EXPERTS_ONLY}:
        rollout, model = RolloutConfig(quantization=kind), ModelConfig(path=str(tmp_path), dtype="bfloat16")
        arguments = engine_arguments(model, rollout, 32, "cpu")
        chosen = EngineArgs(**{name: arguments[name] for name in ("model", *VLLM_KEYS)}).quantization_config
        method_of = OnlineQuantizationConfig(chosen).resolve_quant_method_cls
        assert method_of(RowParallelLinear, "model.layers.0.self_attn.o_proj") is not None
        assert all(method_of(GateLinear, f"model.layers.0.{block}.gate") is None for block in ("mlp", "feed_forward"))
        assert method_of(RowParallelLinear, "visual.blocks.0.mlp.down_proj") is None


@pytest.mark.slow
def test_a_model_that_loads_weights_without_the_reload_is_rejected(tmp_path):
    # vLLM writes the experts and sinks of GPT-OSS into tensors that a reload has emptied, so they would not change.
    config = transformers.GptOssConfig(**SMALL, num_local_experts=3, layer_types=["full_attention"])
    refused = pytest.raises(EngineError, match=r"GptOssForCausalLM: .* would not reach model\.layers\.0\.")
    with vllm_model("GptOssForCausalLM", config, tmp_path, "float32") as (trained, _, transfer), refused:
        push(trained, transfer, tmp_path)


def test_quantized_weights_are_rejected_at_startup():
    with pytest.raises(EngineError, match=r"quantized \(fp8\).*unquantized copy"):
        check_pushable(transformers.Qwen2Config(quantization_config={"quant_method": "fp8"}))
    for kind in (transformers.MixtralConfig, transformers.Qwen2_5_VLConfig):
        assert check_pushable(kind()) is None


def test_reading_pushed_tensors_leaks_no_memory(tmp_path):
    written = {
        "matrix": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "small": torch.randn(7).bfloat16(),
        "scales": torch.randn(3).to(torch.float8_e4m3fn),
    }
    save_file(written, tmp_path / "bucket", {"format": "pt"})
    read = dict(map_tensors(tmp_path / "bucket"))
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name].float(), tensor.float())
    before = sys.getallocatedblocks()
    for _ in range(500):
        dict(map_tensors(tmp_path / "bucket"))
    assert sys.getallocatedblocks() < before + 500, "safe_open of safetensors leaks two integers per tensor"
