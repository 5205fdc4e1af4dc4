"""Environment variables and arguments for GPUs: known to the installed libraries, and set in each process."""

import ast
import importlib.util
import inspect
import json
import mmap
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import MixtralConfig, Qwen2Config

from rlfuse.cluster import cuda
from rlfuse.cluster.placement import Slots
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.vllm import gpu_settings as gpu
from rlfuse.engines.vllm import offline_engine
from rlfuse.engines.vllm.rollout_worker import RolloutWorker
from rlfuse.engines.vllm.setup import engine_arguments, rollout_env
from rlfuse.engines.weights.sync import resolve_transfer
from rlfuse.events import Recorder
from rlfuse.run import inference

TORCH = "torch/include/torch/csrc/distributed/c10d"
READERS = {
    "DS_ACCELERATOR": "deepspeed/accelerator/real_accelerator.py",
    "DS_PIN_MEMORY_BACKEND": "deepspeed/utils/pin_memory.py",
    "OMP_NUM_THREADS": "ray/_private/utils.py",
    "PYTORCH_CUDA_ALLOC_CONF": "torch/include/c10/cuda/CUDAAllocatorConfig.h",
    "TORCH_FR_BUFFER_SIZE": f"{TORCH}/FlightRecorder.hpp",
    "TORCH_FR_DUMP_TEMP_FILE": "torch/lib/libtorch_cpu.so",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": f"{TORCH}/ProcessGroupNCCL.hpp",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": f"{TORCH}/ProcessGroupNCCL.hpp",
    "TORCH_NCCL_ENABLE_MONITORING": f"{TORCH}/ProcessGroupNCCL.hpp",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": f"{TORCH}/ProcessGroupNCCL.hpp",
    "FLASH_ATTENTION_DETERMINISTIC": "transformers/modeling_flash_attention_utils.py",
    "VLLM_BATCH_INVARIANT": "vllm/envs.py",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "vllm/envs.py",
    "VLLM_USE_FLASHINFER_SAMPLER": "vllm/envs.py",
    "TRITON_F32_DEFAULT": "triton/knobs.py",
}
"""Variable -> the installed file that reads it."""
OF_CUDA = {"NCCL_DEBUG", "CUBLAS_WORKSPACE_CONFIG"}
"""Variables of libraries that are installed only with GPUs."""


def site_packages():
    return Path(importlib.util.find_spec("torch").origin).parents[1]


def allocator(settings):
    (found,) = (each.value for each in settings if each.name == cuda.ALLOCATOR)
    return found


@pytest.mark.slow
def test_every_variable_is_known_to_an_installed_library():
    config = Config()
    config.trainer.deterministic = True
    chosen = [*cuda.worker_settings(), *cuda.rank_settings(config, 8), *gpu.engine_settings("float32")]
    chosen += [*cuda.deterministic_settings(config), *gpu.deterministic_settings(config)]
    assert {each.name for each in chosen} == READERS.keys() | OF_CUDA
    for name, reader in READERS.items():
        with (site_packages() / reader).open("rb") as file:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            assert text.find(name.encode()) >= 0, f"{reader} does not contain {name}"


@pytest.mark.slow
def test_torch_reads_the_allocator_settings_from_the_variable_that_is_set():
    """Check that PYTORCH_ALLOC_CONF, which a node may set, has no effect."""
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", cuda.ALLOCATOR: allocator(gpu.engine_settings())}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout.strip() == "expandable_segments:False", done.stderr


def test_ranks_with_cuda_ipc_weight_transfer_have_no_expandable_segments():
    config = Config()
    for transfer, stages in product(("auto", "shm", "ipc"), (1, 2)):
        if (transfer, stages) == ("ipc", 2):  # the configuration's checks refuse it
            continue
        config.rollout.weight_transfer, config.training.pipeline_parallel_size = transfer, stages
        shared = resolve_transfer(transfer, "cuda", stages) == "ipc"
        assert allocator(cuda.rank_settings(config)) == f"expandable_segments:{not shared},{cuda.PINNING}"
    config.trainer.task = "reward_model"
    assert allocator(cuda.rank_settings(config)).startswith("expandable_segments:True,"), "this task has no engines"
    assert rollout_env("cuda")[cuda.ALLOCATOR] == "expandable_segments:False"


class NotStarted(Exception):
    """Raised in place of starting an engine; its argument is the environment of the engine's process."""


def rollout_engine(monkeypatch, device, config):
    def options(slots, first, width, environment):
        raise NotStarted(environment)

    monkeypatch.setattr(Slots, "engine_options", options)
    inference.rollout_handles(config, Slots(None, 1, device), Recorder("controller"), print)


@pytest.mark.parametrize("device, prepared", [("cuda", ["slot 0", "slot 2"]), ("cpu", [])])
def test_engine_actors_import_vllm_while_the_ranks_of_a_gpu_job_load(monkeypatch, device, prepared):
    called = []

    class Actor:
        def options(self, **options):
            return self

        def remote(self, slot):
            prepare = SimpleNamespace(remote=lambda model: called.append((f"slot {2 * slot}", model)))
            return SimpleNamespace(prepare=prepare)

    monkeypatch.setattr(inference.ray, "remote", lambda kind: Actor())
    monkeypatch.setattr(Slots, "engine_options", lambda *arguments: {})
    config = Config()
    config.rollout.tensor_model_parallel_size = 2
    inference.rollout_handles(config, Slots(None, 4, device), Recorder("controller"), print)
    assert called == [(name, config.model) for name in prepared]


def reward_engine(monkeypatch, device, config):
    """Start an engine as reward models and judges do, in the reward process."""

    def build(settings, device):
        raise NotStarted(dict(os.environ))

    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    monkeypatch.setattr("rlfuse.engines.vllm.importing.import_vllm", lambda: None)
    monkeypatch.setattr(offline_engine, "_build", build)
    kwargs = json.dumps(config.rollout.engine_kwargs)
    offline_engine.engine(offline_engine.EngineSettings("model", config.model.dtype, engine_kwargs=kwargs))


NO_FLASHINFER, IEEE = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}, {"TRITON_F32_DEFAULT": "ieee"}


@pytest.mark.parametrize("engine", [rollout_engine, reward_engine])
@pytest.mark.parametrize(
    ("device", "dtype", "engine_kwargs", "expected"),
    [
        ("cuda", "float32", {}, NO_FLASHINFER | IEEE),
        ("cuda", "bfloat16", {}, NO_FLASHINFER),
        ("cuda", "bfloat16", {"dtype": "float32"}, NO_FLASHINFER | IEEE),
        ("cuda", "float32", {"dtype": "bfloat16"}, NO_FLASHINFER),
        ("cpu", "float32", {}, {}),
    ],
)
def test_an_engine_process_has_its_variables_before_vllm_is_imported(
    monkeypatch, engine, device, dtype, engine_kwargs, expected
):
    monkeypatch.setattr(os, "environ", {name: each for name, each in os.environ.items() if name not in READERS})
    config = Config()
    config.model.dtype, config.rollout.engine_kwargs, config.cluster.device = dtype, engine_kwargs, device
    with pytest.raises(NotStarted) as stopped:
        engine(monkeypatch, device, config)
    environment = stopped.value.args[0]
    shown = {each.name: each.value for each in gpu.gpu_settings(config, {})}
    for found in (environment, shown):
        assert {name: found[name] for name in NO_FLASHINFER | IEEE if name in found} == expected


def test_every_engine_argument_is_known_to_vllm_and_has_a_reason():
    tree = ast.parse((site_packages() / "vllm/engine/arg_utils.py").read_text())
    (engine_args,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    known = {node.target.id for node in engine_args.body if isinstance(node, ast.AnnAssign)}
    rollout = replace(Config().rollout, max_num_seqs=1024)
    arguments = gpu.gpu_arguments(rollout, 4096)
    assert arguments.keys() <= known
    assert arguments.keys() == gpu.REASONS.keys()
    assert arguments["cudagraph_capture_sizes"][-1] == 1024, "a full batch decodes with CUDA graphs"


@pytest.mark.parametrize(
    ("sequences", "length", "expected"), [(256, 4096, 8192), (16, 100, 1600), (10_000, 4096, 10_000)]
)
def test_batched_tokens_cover_every_sequence_and_are_capped(sequences, length, expected):
    rollout = replace(Config().rollout, max_num_seqs=sequences)
    assert gpu.gpu_arguments(rollout, length)["max_num_batched_tokens"] == expected


def test_displayed_settings_are_those_of_the_job():
    config = Config()
    config.rollout.engine_kwargs = {"enforce_eager": True, "speculative_config": {"method": "ngram"}}
    config.rollout.gpu_memory_utilization, config.cluster.timeout_s = 0.61, 100.0
    shown = {each.name: each for each in gpu.gpu_settings(config, {}) if each.where == cuda.ENGINES}
    assert shown["gpu_memory_utilization"].value == "0.61"
    assert (shown["enforce_eager"].value, shown["enforce_eager"].why) == ("True", "set by rollout.engine_kwargs")
    assert "async_scheduling" not in shown, "vLLM decides for a custom speculative_config"
    ranks = {each.name: each.value for each in gpu.gpu_settings(config, {}) if each.where == cuda.RANKS}
    assert ranks["time limit of a collective"] == "80 s" and ranks["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "100"
    assert ranks["TORCH_FR_DUMP_TEMP_FILE"] == str(config.run_folder / "stacks" / "nccl_rank_")
    config.trainer.task = "reward_model"
    assert not [each for each in gpu.gpu_settings(config, {}) if cuda.ENGINES in each.where]
    config.cluster.device = "cpu"
    assert gpu.gpu_settings(config, {}) == []


def test_settings_of_a_deterministic_job_override_the_environment(monkeypatch):
    config = Config()
    assert cuda.deterministic_settings(config) == []
    config.trainer.deterministic = True
    needed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1", "VLLM_BATCH_INVARIANT": "1"}
    given = {name: "0" for name in needed}
    monkeypatch.setattr(os, "environ", dict(os.environ) | given)
    assert RolloutWorker.environment(config, "cuda").items() >= needed.items()
    shown = {each.name: each.value for each in gpu.gpu_settings(config, given)}
    assert (
        shown.items() >= needed.items()
        and cuda.environment(cuda.deterministic_settings(config), given).items() <= needed.items()
    )


def test_pipeline_ranks_have_the_settings_for_overlapped_receives():
    config, given = Config(), {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert not cuda.environment(cuda.rank_settings(config), given).keys() & set(cuda.STREAMS)
    config.training.pipeline_parallel_size = 2
    variables = cuda.environment(cuda.rank_settings(config), given)
    assert {name: variables[name] for name in cuda.STREAMS} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
    }


def test_environment_variables_override_all_but_fixed_settings():
    given = {"NCCL_DEBUG": "INFO", cuda.ALLOCATOR: "expandable_segments:True", "OTHER": "1"}
    settings = cuda.rank_settings(Config(), 8) + cuda.worker_settings()[:2]
    variables = cuda.environment(settings, given)
    assert variables["NCCL_DEBUG"] == "INFO" and variables["OMP_NUM_THREADS"] == "8" and "OTHER" not in variables
    assert variables[cuda.ALLOCATOR].startswith("expandable_segments:False,"), "otherwise the first weight push fails"
    (shown,) = (asdict(each) for each in gpu.gpu_settings(Config(), given) if each.name == "NCCL_DEBUG")
    assert shown["value"] == "INFO" and shown["why"] == "as set in the environment of the job"


@pytest.mark.parametrize(("slots", "encoders", "models"), list(product((1, 3, 8), (0, 1, 3, 8, 20), (0, 1, 2, 7))))
def test_actors_of_a_slot_fit_its_ray_resources(slots, encoders, models):
    taken = [2 * cuda.SHARE] * slots
    for slot, share in [cuda.encoder_place(i, encoders, slots) for i in range(encoders)]:
        taken[slot] += share
    for slot, share in [cuda.reward_place(i, models, slots) for i in range(models)]:
        taken[slot] += share
    assert max(taken) <= 1 + 1e-9, "Ray would never schedule the actors"


def test_few_encoder_ranks_are_spread_over_slots():
    slots_of = {ranks: [cuda.encoder_place(rank, ranks, 8)[0] for rank in range(ranks)] for ranks in (1, 2, 4, 8)}
    assert slots_of == {1: [0], 2: [0, 4], 4: [0, 2, 4, 6], 8: list(range(8))}


@pytest.mark.parametrize("sequences", [1, 3, 64, 100, 256, 300, 512, 1024, 5000])
def test_cuda_graphs_of_few_sizes_cover_every_batch(sequences):
    sizes = gpu.graph_sizes(sequences)
    assert sizes == sorted(set(sizes)) and {1, sequences} <= set(sizes)
    assert sizes[-1] == max(sequences, min(2 * sequences, gpu.MAX_GRAPH_TOKENS)), (
        "steps with prefill have graphs as well"
    )
    wider = [next(size for size in sizes if size >= batch) for batch in range(1, sequences + 1)]
    assert all(size <= max(2 * batch, batch + 127) for batch, size in enumerate(wider, 1))
    vllm_sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max(513, sequences + 1), 16)]
    assert len(sizes) <= 14 or len(sizes) < len(vllm_sizes) / 4, "vLLM captures 4x as many"


@pytest.mark.parametrize("key", sorted(gpu.GRAPH_ARGUMENTS))
def test_custom_cuda_graph_arguments_are_kept(key):
    rollout = replace(Config().rollout, engine_kwargs={key: 1})
    assert "cudagraph_capture_sizes" not in gpu.gpu_arguments(rollout, 4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "rollout", "experts", "tunes"),
    [
        ("cuda", {}, 0, False),
        ("cuda", {}, 4, None),
        ("cuda", {"quantization": "fp8_per_tensor"}, 0, None),
        ("cuda", {"engine_kwargs": {"enable_flashinfer_autotune": True}}, 0, True),
        ("cuda", {"engine_kwargs": {"attention_backend": "FLASHINFER"}}, 0, None),
        ("cpu", {}, 0, None),
    ],
    ids=str,
)
def test_flashinfer_is_tuned_only_for_models_that_may_use_it(tmp_path, device, rollout, experts, tunes):
    """Set the argument to False, since vLLM otherwise autotunes on Hopper and later GPUs for any model."""
    from vllm.config import vllm as defaults
    from vllm.model_executor.warmup import kernel_warmup

    assert defaults.OPTIMIZATION_LEVEL_02["kernel_config"] == {"enable_flashinfer_autotune": True}
    assert "if enable_flashinfer_autotune is False:" in inspect.getsource(kernel_warmup.kernel_warmup)
    config = MixtralConfig(num_local_experts=experts) if experts else Qwen2Config()
    config.save_pretrained(tmp_path)
    arguments = engine_arguments(ModelConfig(path=str(tmp_path)), RolloutConfig(**rollout), 256, device)
    assert arguments.get("enable_flashinfer_autotune") is tunes
