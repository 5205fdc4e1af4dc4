"""Rollout engines for tests: handles of real engines, samples for them, and the trainer's side of weight pushes."""

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlfuse.cluster.remote import call
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import ModelConfig
from rlfuse.engines.rollout.rollout_handle import RolloutHandle
from rlfuse.engines.vllm.rollout_worker import RolloutWorker
from rlfuse.engines.vllm.setup import rollout_env
from rlfuse.engines.weights.sync import plan_buckets
from rlfuse.events import Span
from rlfuse.protocols import DeviceSharing, Sampling
from rlfuse.samples import Prompt, Response, Sample, sample_seed

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import from tests

WARM = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24)
REPEATING = {"embed_tokens": 32.0, "lm_head": 2.0}
"""Factors by which weights are scaled so that the next token depends mostly on the last one."""


_idle: list[ray.actor.ActorHandle] = []
"""Actors whose engines have stopped, kept because importing vLLM is most of a start."""


def new_handle(slot: int) -> RolloutHandle:
    return RolloutHandle(partial(_actor, slot), f"rollout/{slot}", timeout_s=280)


def _actor(slot: int) -> ray.actor.ActorHandle:
    if _idle:
        actor = _idle.pop()
        ray.get(actor.__ray_call__.remote(start_over, slot), timeout=240)
        return actor
    options = {"num_cpus": 0, "max_concurrency": 1000, "runtime_env": {"env_vars": rollout_env("cpu")}}
    return ray.remote(RolloutWorker).options(**options).remote(slot)


async def release(handle: RolloutHandle) -> None:
    """Stop the engine; the next handle reuses its actor, also in another file."""
    await handle.stop()
    if handle.lost:
        ray.kill(handle.actor)
    else:
        _idle.append(handle.actor)


def start_over(worker: RolloutWorker, slot: int) -> None:
    """Reset an actor whose engine has stopped to the state of a new one, bound to no core."""
    worker._garbage.close()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread may have ended
            os.sched_setaffinity(int(thread), range(os.cpu_count()))
    worker.__init__(slot)


def settings(**changes) -> RolloutConfig:
    return RolloutConfig(**{"kv_cache_memory_mb": 32, "max_num_seqs": 16} | changes)


def model_config(path) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32")


def sample(index: int, sibling: int = 0, length: int = 40, step: int = 1) -> Sample:
    ids = np.random.default_rng(index).integers(3, 200, length).astype(np.int32)
    prompt = Prompt(index, ids, "", (), "test", None)
    return Sample(prompt, step, sibling, sample_seed(0, step, index, sibling))


async def collect(engine, samples, sampling=WARM):
    return {sample_id: response async for sample_id, response in engine.generate(samples, sampling)}


async def drained(engine, kind: str) -> list[Span]:
    return [span for span in await engine.drain() if span.kind == kind]


async def drafts(engine: RolloutHandle) -> tuple[int, int]:
    """Return (drafted, accepted) tokens since the engine's events were last read."""
    spans = await drained(engine, "decode")
    drafted, accepted = (sum(span.attributes.get(name, 0) for span in spans) for name in ("drafted", "accepted"))
    return drafted, accepted


def assert_log_probs_agree(found: Response, expected: Response, sampling: Sampling) -> None:
    """Assert that log-probs differ by rounding only, which may move few tokens across the top-p or top-k bound."""
    differs = ~np.isclose(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    is_bounded = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    assert differs.sum() <= (0.01 * len(differs) + 1 if is_bounded else 0), found.log_probs - expected.log_probs
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=0.1)


def write_repeating(model: Path, folder: Path) -> Path:
    """Copy the model to `folder`; the last token decides most of the next one, so its responses repeat themselves."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensor *= next((factor for part, factor in REPEATING.items() if part in name), 1.0)
    save_file(tensors, file, {"format": "pt"})
    return folder


async def assert_drafts_change_nothing(
    slot: int, model: Path, samples: list[Sample], samplings: list[Sampling], draft: str = "ngram"
):
    """Generate on an engine without drafts, then on one with; return the responses of the second."""
    handle, found = new_handle(slot), []
    await handle.start(model_config(model), settings(), 512, "cpu")
    expected = [await collect(handle, samples, each) for each in samplings]
    await handle.stop()
    await handle.start(model_config(model), settings(draft=draft), 512, "cpu", 16 * (draft == "ngram"))
    for sampling, undrafted in zip(samplings, expected, strict=True):
        await handle.drain()
        earlier = [replace(each, drafts=(undrafted[each.id].token_ids.copy(),)) for each in samples]
        for each in earlier:
            each.drafts[0][9::10] = 3
        found.append(await collect(handle, earlier, sampling))
        drafted, accepted = await drafts(handle)
        assert drafted > accepted > 0
        for name, response in undrafted.items():
            assert found[-1][name].token_ids.tolist() == response.token_ids.tolist()
            np.testing.assert_allclose(found[-1][name].log_probs, response.log_probs, atol=1e-5)
    await release(handle)
    return found


def reference_log_probs(model, sample: Sample, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Return log_softmax(logits / temperature) of the response tokens, from Hugging Face in float32."""
    ids = torch.tensor(np.concatenate([sample.prompt.token_ids, tokens])).long()[None]
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    start = len(sample.prompt.token_ids)
    return scores[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()


@ray.remote(num_cpus=0)
class HoldsModel:
    """Stand-in for the trainer with a real model and real files."""

    def __init__(self, path: str):
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def sizes(self):
        return [(name, tensor.numel() * 4) for name, tensor in self.model.state_dict().items()]

    def export(self, names, path):
        state = self.model.state_dict()
        save_file({name: state[name] for name in names}, path)

    def change(self, factor: float, name: str = ""):
        """Multiply the weights whose name contains `name`."""
        with torch.no_grad():
            for each, parameter in self.model.named_parameters():
                if name in each:
                    parameter.mul_(factor)


class Exporter:
    def __init__(self, actor, bucket_bytes: int):
        self.actor, self.bucket_bytes = actor, bucket_bytes

    async def bucket_plan(self):
        return plan_buckets(await call(self.actor.sizes.remote(), "trainer", "list", 240), self.bucket_bytes)

    sharing = DeviceSharing()

    async def make_room(self, slot): ...

    async def acquire_device(self, slot): ...

    async def release_device(self, slot): ...

    async def export_bucket(self, names, path):
        await call(self.actor.export.remote(names, path), "trainer", f"write weights to {path}", 240)


def children(pid: int) -> list[int]:
    """Return the child processes of all threads: an asyncio actor starts the engine outside its main thread."""
    lists = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in lists for child in children]


async def pid_of(handle: RolloutHandle) -> int:
    return await call(handle.actor.__ray_call__.remote(lambda self: os.getpid()), handle.name, "return its pid", 240)
