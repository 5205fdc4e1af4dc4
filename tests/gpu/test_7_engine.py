"""A vLLM engine and a trainer alternate on the device: released memory, order of a push, log-probs after it.

(7) of README.md. Needs vLLM and DeepSpeed. Worker and push are those of a run, without Ray.
"""

import copy
import os

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("deepspeed")
import torch
from safetensors.torch import save_file
from small import VOCABULARY, served_folder
from transformers import AutoModelForCausalLM

from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import ModelConfig
from rlfuse.engines.rollout.engine_actor import EMPTY_PARTIAL, Request
from rlfuse.engines.trainer.offloading import release_cached, to_device, to_host
from rlfuse.engines.vllm.rollout_worker import RolloutWorker
from rlfuse.engines.vllm.setup import rollout_env
from rlfuse.engines.weights.cuda_ipc import collect, share_ipc
from rlfuse.engines.weights.sync import WeightPush, plan_buckets, resolve_transfer
from rlfuse.protocols import DeviceSharing, Sampling

DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
MAX_DIFFERENCE = {"cuda": 0.06, "cpu": 1e-4}
"""Bound of the mean log-prob difference between engine and trainer."""


def free(device):
    """Return the device bytes that no process uses."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


class Engine(RolloutWorker):
    """Worker with the interface of a handle that is never lost."""

    lost = False

    async def wait_ready(self):
        return None


class Ranks:
    """Trainer of one slot: a model of transformers, moved like the model of a rank."""

    def __init__(self, folder, device, engine):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE[device]))
        self.model = copy.deepcopy(loaded).to(device)  # a copy, because memory of a mapped file can't be released
        self.device, self.engine, self.there, self.seen, self.kept = device, engine, True, [], []

    sharing = DeviceSharing()

    async def make_room(self, slot):
        release_cached(0)

    async def acquire_device(self, slot):
        if not self.there:
            to_device(self.model)
        self.there = True

    async def release_device(self, slot):
        if self.there:
            to_host(self.model)
            release_cached(0)
        self.there = False

    async def bucket_plan(self):
        return plan_buckets([(name, each.nbytes) for name, each in self.model.named_parameters()], 1 << 20)

    def writer(self, names):
        return 0

    async def export_bucket(self, names, path):
        self._note()
        save_file({name: self.model.get_parameter(name).detach().cpu() for name in names}, path)

    async def share_ipc(self, names):
        self._note()
        update, buffer = share_ipc({name: self.model.get_parameter(name) for name in names})
        self.kept = [*self.kept[-1:], buffer]
        return [update]

    async def release_ipc(self):
        self.kept = []
        collect()

    def _note(self):
        """Record which sides are awake during a transfer of weights."""
        self.seen.append((self.there, sorted(self.engine._asleep), free(self.device)))

    @torch.no_grad()
    def change(self):
        """Change all weights, as an optimizer step would."""
        for number, parameter in enumerate(self.model.parameters()):
            torch.manual_seed(number)
            parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter))

    @torch.no_grad()
    def log_probs(self, prompt, tokens):
        ids = torch.from_numpy(np.concatenate([prompt, tokens])).long().to(self.device)
        scores = self.model(ids[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        return scores.gather(1, ids[len(prompt) :, None])[:, 0].cpu().numpy()


async def generated(engine, prompts, name):
    """Return the responses to the prompts, in their order."""
    requests = [Request(f"{name}/{i}", 1, i, prompt, EMPTY_PARTIAL) for i, prompt in enumerate(prompts)]
    found = {}
    async for part in engine.generate(requests, Sampling(1.0, 1.0, -1, 32)):
        found |= dict(part)
    return [found[request.id] for request in requests]


def log_prob_difference(ranks, prompts, responses):
    """Return the mean log-prob difference between engine and trainer."""
    pairs = zip(prompts, responses, strict=True)
    return np.abs(np.concatenate([r.log_probs - ranks.log_probs(p, r.token_ids) for p, r in pairs])).mean()


async def test_engine_and_trainer_alternate_on_the_device(device, tmp_path):
    os.environ |= rollout_env(device, dtype=DTYPE[device])
    folder, engine = served_folder(tmp_path), Engine(0)
    rollout = RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=16, gpu_memory_utilization=0.3)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, 40).astype(np.int32) for _ in range(8)]
    before = free(device)
    facts = await engine.start(ModelConfig(folder, DTYPE[device]), rollout, 512, device)
    cache, places = facts["kv_tokens"] * facts["kv_bytes_per_token"], {"started": before - free(device)}
    try:
        ranks = Ranks(folder, device, engine)
        assert log_prob_difference(ranks, prompts, await generated(engine, prompts, "first")) < MAX_DIFFERENCE[device]
        places["awake"] = before - free(device)
        await engine.sleep()
        places["asleep"] = before - free(device)
        with pytest.raises(RuntimeError, match="asleep"):
            await generated(engine, prompts, "asleep")
        push = WeightPush(ranks, [engine], 1, resolve_transfer("auto", device))
        for version in (1, 2):
            await ranks.acquire_device(0)
            ranks.change()
            old = ranks.seen = []
            await push.push(version)
            assert old and all(there and asleep == ["kv_cache"] for there, asleep, _ in ranks.seen)
            assert not ranks.there and await engine.version() == version
            places[f"push {version}"] = before - min(left for *_, left in ranks.seen)
            places[f"after push {version}"] = before - free(device)
            await ranks.acquire_device(0)  # alongside the engine, for the comparison: the model is small
            responses = await generated(engine, prompts, f"version {version}")
            assert {response.weight_version for response in responses} == {version}
            places[f"log-probs {version}"] = log_prob_difference(ranks, prompts, responses)
            assert places[f"log-probs {version}"] < MAX_DIFFERENCE[device]
            await engine.sleep()
    finally:
        await engine.stop()
    print(f"KV cache {cache} bytes; bytes on the device, and mean differences of log-probs: {places}")
    if device == "cuda":
        assert places["awake"] - places["asleep"] > 0.95 * cache
        assert places["awake"] - places["push 1"] > 0.9 * cache
        assert abs(places["after push 2"] - places["after push 1"]) < 0.05 * cache
