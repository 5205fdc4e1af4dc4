"""Layers of vLLM compute with the weights that were pushed last, also where a kernel holds them in an order of its own.

In one process and without an engine: vLLM's model, its linear layers and experts on the CPU, and buckets as the trainer
writes them.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import transformers

from rlfuse.engines.weights.exporting import Exporter
from rlfuse.engines.weights.sync import check_pushable
from rlfuse.errors import EngineError

pytestmark = pytest.mark.xdist_group("vllm")  # importing it takes long: by one process

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, initializer_range=0.3, num_experts_per_tok=2,
)  # fmt: skip


@contextmanager
def served(kind: str, config: transformers.PreTrainedConfig, folder, dtype: str):
    """transformers' model, vLLM's with other weights, and its `SharedMemoryTransfer`."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from rlfuse.engines.weights.receiver import SharedMemoryTransfer

    torch.manual_seed(0)
    trained = getattr(transformers, kind)(config).to(getattr(torch, dtype)).eval()
    trained.save_pretrained(folder)
    arguments = EngineArgs(model=str(folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=32)
    settings, default = arguments.create_engine_config(), torch.get_default_dtype()
    with set_current_vllm_config(settings):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel()
        torch.set_default_dtype(trained.dtype)
        model = initialize_model(settings)
        torch.set_default_dtype(default)
        with Exporter(trained, 0).gathered([*Exporter(trained, 0).tensors]) as tensors:
            model.load_weights(tensors.items())
        process_weights_after_loading(model, settings.model_config, torch.device("cpu"))
        try:
            with torch.no_grad():
                yield trained, model, SharedMemoryTransfer(None, settings, torch.device("cpu"), model)
        finally:
            cleanup_dist_env_and_memory()


def push(trained, transfer, folder):
    """Other weights, in two buckets that cut the layer."""
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
def test_each_push_is_what_layers_compute_with(dtype, tied, width, tmp_path):
    """Experts, also of a width that their kernel pads; the head and a linear layer, packed as well."""
    from vllm.forward_context import set_forward_context

    sizes = SMALL | {"intermediate_size": width}
    config = transformers.MixtralConfig(**sizes, num_local_experts=3, tie_word_embeddings=tied)
    with served("MixtralForCausalLM", config, tmp_path, dtype) as (trained, model, transfer):
        states = torch.randn(9, 32, dtype=trained.dtype)
        ours, theirs = trained.model.layers[0], model.model.layers[0]
        for _ in range(3):
            push(trained, transfer, tmp_path)
            with set_forward_context(None, transfer.vllm_config):
                experts = theirs.block_sparse_moe(states)
            found = [experts, theirs.self_attn.qkv_proj(states)[0]]
            found += [model.lm_head.quant_method.apply(model.lm_head, states), model.model.embed_tokens.weight]
            attention = ours.self_attn
            whole = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
            expected = [ours.mlp(states[None])[0], states @ whole.T]
            expected += [trained.lm_head(states), trained.model.embed_tokens.weight]
            for one, other in zip(found, expected, strict=True):
                close = 1e-5 if dtype == "float32" else 0.02
                torch.testing.assert_close(one, other, atol=close * float(other.abs().max()), rtol=0)


@pytest.mark.slow
def test_a_model_that_loads_past_the_reload_is_refused(tmp_path):
    """vLLM writes GPT-OSS's experts and sinks into tensors that a reload has emptied: they would stay as they were."""
    config = transformers.GptOssConfig(**SMALL, num_local_experts=3, layer_types=["full_attention"])
    refused = pytest.raises(EngineError, match=r"GptOssForCausalLM: .* would not reach model\.layers\.0\.")
    with served("GptOssForCausalLM", config, tmp_path, "float32") as (trained, _, transfer), refused:
        push(trained, transfer, tmp_path)


@pytest.mark.parametrize(
    "config, reason",
    [
        (transformers.GptOssConfig(), "keep some weights of a gpt_oss as they were"),
        (transformers.Qwen2Config(quantization_config={"quant_method": "fp8"}), r"quantized \(fp8\).*unquantized copy"),
    ],
)
def test_what_engines_can_not_take_is_refused_before_anything_starts(config, reason):
    with pytest.raises(EngineError, match=reason):
        check_pushable(config)


def test_other_models_are_not():
    for kind in (transformers.MixtralConfig, transformers.Qwen2_5_VLConfig):
        assert check_pushable(kind()) is None
