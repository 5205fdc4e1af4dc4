"""Differing tokens per million with drafts and with another batch size, and decoding speed with drafts.

    python tests/benchmarks/draft_tokens.py [--dtypes bfloat16 float32] [--samples 128] [--hidden 256] [--layers 6]

A random Qwen2 that repeats itself generates the same seeded samples in batches of 16, in batches of 4, one by one, and
in batches of 16 with n-gram drafts. A response is compared with the first run up to its first differing token, because
all later tokens have another context. Log-probs are compared up to there.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

import numpy as np
import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.engines.rollout.rollout_handle import RolloutHandle
from rlfuse.events import Recorder
from rlfuse.progress import part
from rlfuse.protocols import Sampling
from rlfuse.run import inference
from rlfuse.samples import Prompt, Response, Sample, sample_seed
from rlfuse.tasks.vocabulary import build_tokenizer

BATCH, OTHERS, PROMPT, RESPONSE = 16, (4, 1), 32, 256


def job(folder: str, options: argparse.Namespace, dtype: str, drafted: int) -> Config:
    """Return a job with one engine on the CPU that drafts while at most `drafted` samples decode."""
    config = Config()
    config.model.path, config.model.dtype = folder, dtype
    config.trainer.n_gpus_per_node, config.cluster.device = 1, "cpu"
    config.data.max_prompt_length, config.data.max_response_length = PROMPT, RESPONSE
    config.rollout.max_num_seqs, config.rollout.kv_cache_memory_mb = BATCH, 64
    config.fusion.tail_speculation = drafted
    return config


async def generated(
    handle: RolloutHandle, samples: list[Sample], batch: int, sampling: Sampling
) -> tuple[dict[str, Response], float, tuple[int, int]]:
    """Return responses, seconds, and (drafted, accepted) tokens."""
    found, began = {}, time.perf_counter()
    await handle.drain()
    for first in range(0, len(samples), batch):
        found |= {name: each async for name, each in handle.generate(samples[first : first + batch], sampling)}
    seconds, spans = time.perf_counter() - began, await handle.drain()
    drafts = (sum(span.attributes.get(name, 0) for span in spans) for name in ("drafted", "accepted"))
    return found, seconds, tuple(drafts)


def compared(found: dict[str, Response], expected: dict[str, Response]) -> tuple[int, int, float]:
    """Return tokens compared, responses that differ, and the largest difference of log-probs before that."""
    tokens, differing, error = 0, 0, 0.0
    for name, response in expected.items():
        most = min(len(response.token_ids), len(found[name].token_ids))
        unequal = np.flatnonzero(response.token_ids[:most] != found[name].token_ids[:most])
        same = int(unequal[0]) if len(unequal) else most
        tokens, differing = tokens + same + bool(len(unequal)), differing + bool(len(unequal))
        errors = np.abs(response.log_probs[:same] - found[name].log_probs[:same])
        error = max(error, float(errors.max(initial=0)))
    return tokens, differing, error


async def measured(folder: str, options: argparse.Namespace, slots: placement.Slots, dtype: str) -> None:
    """Print the rows of one dtype."""
    rng, sampling = np.random.default_rng(0), Sampling(options.temperature, 1.0, -1, RESPONSE)
    prompts = [Prompt(i, rng.integers(3, 90, PROMPT).astype(np.int32), "", (), "test", None) for i in range(10_000)]
    samples = [Sample(prompts[i], 1, 0, sample_seed(0, 1, i, 0)) for i in range(options.samples)]
    results = {}
    for drafted, batches in ((0, (BATCH, *OTHERS)), (BATCH, (BATCH,))):
        config = job(folder, options, dtype, drafted)
        [handle] = inference.rollout_handles(config, slots, Recorder("benchmark"), print)
        [start] = inference.engine_starts([handle], config, slots, lambda name: part(name, quiet=True))
        await start()
        await generated(handle, samples[:BATCH], BATCH, sampling)
        for batch in batches:
            name = f"batches of {batch}{', drafts' * bool(drafted)}"
            results[name] = await generated(handle, samples, batch, sampling)
        await handle.stop()
        ray.kill(handle.actor)
    expected = results[f"batches of {BATCH}"][0]
    for name, (found, seconds, (offered, accepted)) in results.items():
        tokens, differing, error = compared(found, expected)
        speed = sum(len(each.token_ids) for each in found.values()) / seconds
        share = f"{accepted / offered:.2f} of {offered}" if offered else ""
        rate = 1e6 * differing / tokens
        print(f"| {dtype} | {name} | {tokens} | {differing} | {rate:.0f} | {error:.1e} | {share} | {speed:.0f} |")


async def main(options: argparse.Namespace) -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        heads = dict(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=options.layers)
        tokenizer = build_tokenizer()
        sizes = dict(
            hidden_size=options.hidden, intermediate_size=4 * options.hidden, vocab_size=len(tokenizer), eos_token_id=1
        )
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, initializer_range=0.08, tie_word_embeddings=False))
        with torch.no_grad():
            model.lm_head.weight *= options.sharpness
            model.get_input_embeddings().weight *= (
                32  # the next token depends mostly on the last one, so that responses repeat themselves
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.1f}M parameters, {options.samples} samples")
        print("| dtype | run | tokens compared | differing | per million | log-probs | accepted | tokens/s |")
        print("|---|---|---|---|---|---|---|---|")
        slots = await placement.start(job(folder, options, options.dtypes[0], 0))
        for dtype in options.dtypes:
            await measured(folder, options, slots, dtype)
    placement.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"])
    for name, value in (("samples", 128), ("hidden", 256), ("layers", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("temperature", 1.0), ("sharpness", 2.5)):
        parser.add_argument(f"--{name}", type=float, default=value)
    asyncio.run(main(parser.parse_args()))
