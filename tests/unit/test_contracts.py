"""Calls of vLLM, DeepSpeed, torch and Ray match the installed signatures, including calls that run only on GPUs."""

import ast
import inspect
import pickle
import re
import textwrap
from collections import Counter
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts import LIBRARIES, attributes, read

import rlfuse
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import ActorConfig, ModelConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]  # one process: importing vLLM is slow

ROOT = Path(rlfuse.__file__).parent
DEEPSPEED, ZERO_1 = "deepspeed.DeepSpeedEngine", "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
SHARDED = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
ASYNC_LLM, LLM = "vllm.v1.engine.async_llm.AsyncLLM", "vllm.v1.engine.llm_engine.LLMEngine"
CUDA = "deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator"
RECEIVERS = {
    "engines/deepspeed/optimizer.py: engine.optimizer": ZERO_1,
    "engines/deepspeed/optimizer.py: grid": "deepspeed.runtime.pipe.topology.PipelineParallelGrid",
    "engines/deepspeed/optimizer.py: zero": SHARDED,
    "engines/deepspeed/states.py: engine": DEEPSPEED,
    "engines/deepspeed/states.py: engine.optimizer": ZERO_1,
    "engines/deepspeed/states.py: wrapper": "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
    "engines/deepspeed/states.py: zero": SHARDED,
    "engines/pipeline/waits.py: work": "torch.distributed.Work",
    "engines/vllm/rollout_worker.py: cache": "vllm.config.CacheConfig",
    "engines/vllm/rollout_worker.py: self._engine": ASYNC_LLM,
    "engines/vllm/rollout_worker.py: self._engine.model_config": "vllm.config.ModelConfig",
    "engines/vllm/rollout_worker.py: self._engine.vllm_config": "vllm.config.VllmConfig",
    "engines/vllm/setup.py: vllm_config.model_config": "vllm.config.ModelConfig",
    "engines/vllm/setup.py: vllm_config.parallel_config": "vllm.config.ParallelConfig",
    "engines/trainer/activation_stores.py: self._stream": "torch.cuda.Stream",
    "engines/trainer/activation_stores.py: torch.cuda.current_stream()": "torch.cuda.Stream",
    "engines/deepspeed/deepspeed_model.py: get_accelerator()": CUDA,
    "engines/deepspeed/deepspeed_model.py: self.engine": DEEPSPEED,
    "engines/trainer/offloading.py: stream": "torch.cuda.Stream",
    "engines/trainer/offloading.py: torch.cuda.current_stream()": "torch.cuda.Stream",
    "engines/vllm/offline_engine.py: self._llm": LLM,
    "engines/vllm/offline_engine.py: llm": LLM,
}
"""Classes of expressions without an annotation."""
PASSED = {"engines/pipeline/schedule_executor.py: call": ("torch.distributed.isend", "torch.distributed.irecv")}
"""Functions that are passed as an argument of this name."""
MIN_CALLS = {"vllm": 50, "deepspeed": 25, "ray": 30, "torch.distributed": 25, "torch.cuda": 14}
ON_GPUS = {
    f"{ASYNC_LLM}.sleep",
    f"{ASYNC_LLM}.wake_up",
    f"{ASYNC_LLM}.update_weights",
    "torch.cuda.synchronize",
    "torch.multiprocessing.reductions.reduce_tensor",
    "torch.cuda.ipc_collect",
    "torch.cuda.graph",
    "torch.cuda.graph_pool_handle",
    "torch.cuda.set_sync_debug_mode",
    "torch.cuda.Event",
    "torch.cuda.Stream.wait_event",
    "torch.cuda.Stream.wait_stream",
    "torch.cuda.Stream.record_event",
    "torch.cuda.Stream.synchronize",
    "torch.distributed.ProcessGroupNCCL.Options",
    "torch.distributed.irecv",
    "torch.distributed.init_process_group",
    "torch.optim.AdamW",
}
"""Calls that no other test executes."""


def sources():
    return {str(file.relative_to(ROOT)): file.read_text() for file in sorted(ROOT.rglob("*.py"))}


def test_every_library_call_matches_the_installed_signature(record_property):
    reading = read(sources(), RECEIVERS, PASSED)
    assert not reading.problems, "\n".join(reading.problems)
    found = Counter(name for bound in reading.bound for name in LIBRARIES if bound.target.startswith(name))
    print(", ".join(f"{name}: {count}" for name, count in found.most_common()))
    record_property("bound", dict(found))
    assert all(found[library] >= count for library, count in MIN_CALLS.items()), found
    assert {bound.target for bound in reading.bound} >= ON_GPUS
    classes = {bound.target.rpartition(".")[0] for bound in reading.bound}
    assert classes >= {DEEPSPEED, ZERO_1, ASYNC_LLM, LLM, "torch.distributed.Work"}


MISTAKES = {
    "wrong.py:3: dist.new_group(): got an unexpected keyword argument 'rank'": """
        import torch.distributed as dist
        dist.new_group([0, 1], rank=2)""",
    "wrong.py:3: end(): missing a required argument: 'actor'": """
        from ray import kill as end
        end()""",
    "wrong.py:4: work.wait(): too many positional arguments": """
        import torch.distributed as dist
        def wait(work: dist.Work):
            work.wait(1, 2)""",
    "wrong.py:2: torch.distributed.renamed is not in the installed version": """
        from torch.distributed import renamed""",
    "wrong.py:3: torch.cuda.ipc_gather is not in the installed version": """
        import torch
        torch.cuda.ipc_gather()""",
    "wrong.py:5: torch.distributed.ProcessGroupNCCL.Options has no renamed": """
        import torch.distributed as dist
        self._options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        self._options._timeout, self._options.config = None, None
        self._options.renamed = True""",
    "wrong.py:3: dist.ProcessGroupNCCL.Options(): got an unexpected keyword argument 'priority'": """
        import torch.distributed as dist
        dist.ProcessGroupNCCL.Options(priority=True)""",
    "wrong.py:2: worker.is_completed() may be a method of torch.distributed.Work: add worker to the receivers": """
        worker.is_completed()""",
    "wrong.py:3: call(): got an unexpected keyword argument 'rank'": """
        def start(call):
            call(tensor, rank=1)""",
    "wrong.py:4: PlacementGroup has no wait_all, so the override is never called": """
        import ray.util.placement_group as placed
        class Mine(placed.PlacementGroup):
            def wait_all(self): ...""",
    "wrong.py:4: wait() of PlacementGroup has another signature: too many positional arguments": """
        from ray.util.placement_group import PlacementGroup
        class Mine(PlacementGroup):
            def wait(self): ...""",
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_a_call_that_does_not_match_is_reported(expected):
    source = inspect.cleandoc("\n" + MISTAKES[expected])
    receivers, passed = {"other.py: work": "torch.distributed.Work"}, {"wrong.py: call": ("torch.distributed.isend",)}
    reading = read({"wrong.py": "\n" + source}, receivers, passed)
    assert [problem for problem in reading.problems if problem == expected], reading.problems


# Names in dictionaries and strings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(num_hidden_layers=1, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("device, width, drafted", [("cuda", 1, 0), ("cuda", 2, 0), ("cuda", 1, 4), ("cpu", 2, 4)])
def test_vllm_accepts_the_engine_arguments(model, device, width, drafted):
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rlfuse.engines.vllm.setup import engine_arguments

    rollout = RolloutConfig(tensor_model_parallel_size=width, max_num_seqs=1024)
    arguments = engine_arguments(model, rollout, 256, device, drafted)
    known = {field.name: field.type for field in fields(AsyncEngineArgs)}
    assert arguments.keys() <= known.keys()
    parsed = AsyncEngineArgs(**arguments)
    assert parsed.distributed_executor_backend == ("ray" if (device, width) == ("cuda", 2) else "mp")
    assert parsed.enable_sleep_mode is (device == "cuda")
    assert parsed.logprobs_mode == "processed_logprobs"


def test_connectors_and_weight_transfers_are_registered():
    from vllm.config import KVTransferConfig, WeightTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rlfuse.engines.vllm import worker_extension
    from rlfuse.engines.vllm.kv_transfer import nixl, shared_memory
    from rlfuse.engines.vllm.kv_transfer.store import CONNECTORS, connector_arguments
    from rlfuse.engines.weights.sync import resolve_transfer

    found = {
        transfer: KVConnectorFactory.get_connector_class(KVTransferConfig(**connector_arguments(transfer)))
        for transfer in CONNECTORS
    }
    assert found == {"shm": shared_memory.MigrationConnector, "nixl": nixl.NixlMigrationConnector}
    assert worker_extension.WorkerExtension  # imported by vLLM's workers; registers the shared-memory transfer
    for device in ("cpu", "cuda"):
        backend = WeightTransferConfig(backend=resolve_transfer("auto", device)).backend
        assert backend in WeightTransferEngineFactory._registry


def test_ipc_weight_handles_have_the_format_of_vllm(monkeypatch):
    """Check torch's order in handles, vLLM's names of fields, and the serialization of both to the engine."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from rlfuse.engines.vllm.setup import rollout_env
    from rlfuse.engines.weights import cuda_ipc

    rebuilt = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert rebuilt[6] == "storage_device", "vLLM sets its device at this index"
    assert "list_args[6] = device_index" in inspect.getsource(packed_ipc_consumer)
    received = inspect.getsource(IPCWeightTransferEngine.receive_weights)
    assert "packed_ipc_consumer(" in received and "self.packed" in received
    assert IPCWeightTransferEngine.init_info_cls(packed=True).packed
    assert inspect.signature(AsyncLLM.init_weight_transfer_engine).bind(
        None, WeightTransferInitRequest({"packed": True})
    )
    assert f"if storage._untyped_storage.device.type == {'cuda'!r}".replace("'", '"') in inspect.getsource(
        reduce_tensor
    )

    for name, value in rollout_env("cuda").items():
        monkeypatch.setenv(name, value)
    tensor = torch.ones(2, 3)
    handle = (
        torch.Tensor, tensor.size(), tensor.stride(), 0, torch.TypedStorage, tensor.dtype, 0,
        b"handle\0of a segment", 24, 0, False, b"counter", 0, b"event", True,
    )  # fmt: skip
    assert len(handle) == len(rebuilt)
    keys = strings(cuda_ipc.share_ipc) | strings(cuda_ipc.pack)
    assert {"names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles"} <= keys & {
        f.name for f in fields(IPCWeightTransferUpdateInfo)
    }
    one = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]], "tensor_sizes": [24]}
    shared = [one | {"ipc_handles": {gpu: handle}} for gpu in ("GPU-0", "GPU-1")]
    sent = MsgpackEncoder().encode(("update_weights", None, (), {"update_info": cuda_ipc.merge_ipc(shared)}))
    method, _, _, arguments = MsgpackDecoder().decode(pickle.loads(pickle.dumps([bytes(part) for part in sent])))
    found = IPCWeightTransferUpdateInfo(**arguments["update_info"])
    assert method == "update_weights" and found.names == ["w"] and found.shapes == [[2, 3]]
    assert found.ipc_handles.keys() == {"GPU-0", "GPU-1"} and found.tensor_sizes == [24]
    assert tuple(map(plain, found.ipc_handles["GPU-1"])) == tuple(map(plain, handle))


def strings(function) -> set[str]:
    """Return the string constants in the function's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def plain(value):
    return tuple(value) if isinstance(value, list | tuple) else value


def test_parts_of_an_engine_match_vllm_sleep_tags():
    from vllm.device_allocator import DEFERRABLE_TAGS
    from vllm.v1.executor.abstract import SLEEP_TAGS

    from rlfuse.protocols import PARTS

    assert set(PARTS) == SLEEP_TAGS == set(DEFERRABLE_TAGS)


def source_of(path, name):
    """Return the source of a function in a vLLM module that cannot be imported without CUDA."""
    tree = ast.parse((Path(find_spec("vllm").origin).parent / path).read_text())
    return next(ast.unparse(node) for node in ast.walk(tree) if getattr(node, "name", None) == name)


def test_level_2_sleep_discards_weights_and_restores_buffers():
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.worker_base import WorkerBase

    from rlfuse.engines.vllm.receiver import ReceiverExtension

    inspect.signature(AsyncLLM.sleep).bind(None, level=2)
    inspect.signature(AsyncLLM.collective_rpc).bind(None, "unpushed_tensors")
    assert callable(ReceiverExtension.unpushed_tensors) and not hasattr(WorkerBase, "unpushed_tensors")
    assert hasattr(WorkerBase, "get_model")
    suspended = inspect.getsource(CuMemBackend.suspend)
    assert "if level == 1:" in suspended and '("weights", *offload_tags)' in suspended
    slept, woken = (source_of("v1/worker/gpu_worker.py", name) for name in ("sleep", "wake_up"))
    assert "if level == 2:" in slept and "_sleep_saved_buffers = {name: buffer.cpu().clone()" in slept
    assert "'weights' in tags" in woken and "buffer.data.copy_(self._sleep_saved_buffers[name].data)" in woken


def test_an_explicit_kv_cache_size_skips_memory_profiling():
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {"kv_cache_memory_bytes": 1 << 30, "enable_sleep_mode": False, "gpu_memory_utilization": 0.01}
    assert given.keys() <= {field.name for field in fields(AsyncEngineArgs)}
    measured = source_of("v1/worker/gpu_worker.py", "determine_available_memory")
    before, _, after = measured.partition("if (kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes):")
    assert after and "memory_profiling" not in before and "return" in after.split("memory_profiling")[0]
    demanded = source_of("v1/worker/utils.py", "request_memory")
    assert "total_memory * cache_config.gpu_memory_utilization" in demanded, "the memory that must be free at startup"
    inspect.signature(torch.cuda.set_per_process_memory_fraction).bind(0.5)


def test_a_special_token_can_be_a_stop_string():
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    from rlfuse.engines.rollout.engine_actor import EMPTY_PARTIAL, Request
    from rlfuse.engines.vllm.setup import sampling_params
    from rlfuse.protocols import Sampling
    from rlfuse.tasks.vocabulary import PAD, build_tokenizer

    tokenizer, ids = build_tokenizer(), np.arange(3, 6, dtype=np.int32)
    params = sampling_params(
        Request("a", 0, 1, ids, EMPTY_PARTIAL), Sampling(1.0, 1.0, -1, 8, stop=(PAD,)), 8, {}, None
    )
    given = {"request_id": "a", "prompt_token_ids": ids.tolist(), "sampling_params": params}
    request = EngineCoreRequest(**dict.fromkeys(EngineCoreRequest.__struct_fields__) | given)
    reader = IncrementalDetokenizer.from_new_request(tokenizer, request)
    assert reader.update([7, tokenizer.pad_token_id], False) == PAD


def test_environment_variables_are_known_to_vllm_and_ray():
    import ray
    import vllm.envs

    texts = {name for source in sources().values() for name in re.findall(r"\"((?:VLLM|RAY)_\w+)\"", source)}
    ours = {name for name in texts if name.startswith("VLLM_")}
    assert len(ours) > 8 and ours <= vllm.envs.environment_variables.keys()
    folder = Path(ray.__file__).parent
    files = [folder / "core/src/ray/raylet/raylet", *(folder / "_private").rglob("*.py")]
    files += (folder / "dashboard/modules/job").glob("*.py")
    known = b"".join(file.read_bytes() for file in [*files, *(folder / "_common").rglob("*.py")])
    unknown = [
        name for name in texts - ours if not any(each.encode() in known for each in (name, name.removeprefix("RAY_")))
    ]
    assert not unknown


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_deepspeed_accepts_the_config(stage, offload):
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    from rlfuse.engines.deepspeed.optimizer import _config

    given = _config(ActorConfig(zero_stage=stage, offload_optimizer=offload), torch.bfloat16)
    top = {value for value in vars(constants).values() if isinstance(value, str)} | {ZERO_OPTIMIZATION, "bf16"}
    assert given.keys() <= top
    zero = given["zero_optimization"]
    offloaded = zero.get("offload_optimizer", {})
    for keys, config in (
        (zero, DeepSpeedZeroConfig),
        (given["bf16"], DeepSpeedBF16Config),
        (offloaded, DeepSpeedZeroOffloadOptimizerConfig),
    ):
        assert keys.keys() <= {name for key, field in config.model_fields.items() for name in (key, field.alias)}
    parsed = DeepSpeedConfig(given)
    assert parsed.zero_config.stage == stage and parsed.bfloat16_config.enabled
    assert parsed.gradient_clipping == given["gradient_clipping"]
    assert (parsed.zero_config.offload_optimizer is not None) == offload


def test_optimizer_states_have_the_expected_deepspeed_attributes():
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Sharded
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero

    assert "basic_optimizer" in attributes(DEEPSPEED)
    assert "fp32_partitioned_groups_flat" in attributes(f"{Sharded.__module__}.{Sharded.__qualname__}")
    assert {each.value for each in OffloadStateTypeEnum} >= {"optim_states", "hp_params"}
    for kind in (Zero, Sharded):
        parameters = [*inspect.signature(kind.offload_states).parameters]
        assert parameters == ["self", "include", "device", "pin_memory", "non_blocking"]
    assert "supported only for DeepSpeed FusedAdam" in inspect.getsource(Sharded.offload_states)
    assert "_clear_hp_buffer_references" in inspect.getsource(Zero.offload_states)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("width", [1, 2])
def test_ray_accepts_the_actor_options(device, width):
    import ray
    from ray.runtime_env import RuntimeEnv
    from ray.util.placement_group import PlacementGroup

    from rlfuse.cluster.placement import Slots, reward_options
    from rlfuse.engines.vllm.rollout_worker import RolloutWorker
    from rlfuse.engines.vllm.setup import rollout_env

    slots = Slots(PlacementGroup.empty(), 4, device)
    chosen = [
        slots.engine_options(2, width, rollout_env(device, slots=range(2, 2 + width))),
        slots.options(1, 0.4),
        reward_options(0, 2, slots, device, {}),
    ]
    for options in chosen:
        assert ray.remote(RolloutWorker).options(**options, max_concurrency=1000)
        assert RuntimeEnv(**options["runtime_env"])
        assert all(isinstance(value, str) for value in options["runtime_env"]["env_vars"].values())
    with pytest.raises(ValueError, match="gpus"):
        ray.remote(RolloutWorker).options(gpus=1)
