"""The fastest plan for public models on 8, 64 and 512 devices: `python tests/benchmarks/plan_search.py [model ...]`.

Prints table rows: the plan, its step time, the MFU of training without overlap (`fusion=serial`; recomputation does not
count), memory of the fullest phase, and the CPU time of the search. Sizes are those of the models' config.json on the
hub; no weights are needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rlfuse.config.compose import compose_job
from rlfuse.config.facts import Facts
from rlfuse.engines.memory.estimate import GIB
from rlfuse.engines.memory.model_sizes import Shape, read_shape
from rlfuse.tools.planning.cluster_file import Cluster
from rlfuse.tools.planning.forecast import lengths_of
from rlfuse.tools.planning.search import refine, search
from rlfuse.tools.planning.search_command import PATIENCE, REFINE_SHARE, SEARCH_SHARE, SECONDS, name_of
from rlfuse.tools.planning.searched_job import Job
from rlfuse.tools.planning.space import axes_of

DEVICES = (8, 64, 512)
QWEN = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}


def sizes(layers: int, hidden: int, intermediate: int, heads: int, keys: int, **more) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
    } | more


VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
MODELS = {
    "Qwen2.5-0.5B": QWEN | sizes(24, 896, 4864, 14, 2, tie_word_embeddings=True),
    "Qwen2.5-1.5B": QWEN | sizes(28, 1536, 8960, 12, 2, tie_word_embeddings=True),
    "Qwen2.5-7B": QWEN | sizes(28, 3584, 18944, 28, 4, tie_word_embeddings=False, vocab_size=152064),
    "Llama-3.1-8B": sizes(
        32, 4096, 14336, 32, 8, model_type="llama", vocab_size=128256, max_position_embeddings=131072
    ),
    "Qwen2.5-32B": QWEN | sizes(64, 5120, 27648, 40, 8, tie_word_embeddings=False, vocab_size=152064),
    "Qwen2.5-72B": QWEN | sizes(80, 8192, 29568, 64, 8, tie_word_embeddings=False, vocab_size=152064),
    "Qwen3-30B-A3B": sizes(
        *(48, 2048, 6144, 32, 4),
        model_type="qwen3_moe",
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=40960,
    ),
    "Qwen2.5-VL-7B": QWEN
    | sizes(28, 3584, 18944, 28, 4, model_type="qwen2_5_vl", vocab_size=152064, vision_config=VISION)
    | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, metavar="N", help="multiples of 8")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of CPU time, of each (default: %(default)g)")
    arguments = parser.parse_args()
    print("| model | devices | plan | tokens | again | step s | training MFU | GiB | at least s | search s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
            shape = read_shape(folder, "model.path")
            for devices in arguments.devices:
                print(row(name, devices, job_of(folder, shape, devices), arguments.seconds), flush=True)


def job_of(folder: str, shape: Shape, devices: int) -> Job:
    """Return a GRPO job on nodes of eight A100 80 GB: 32 prompts per device, 8 responses of 1,024 tokens on average."""
    cluster = Cluster(nodes=devices // 8, devices_per_node=8, device_memory_gb=80, peak_tflops=312)
    words = [
        f"model.path={folder}",
        "data.train_files=[none]",
        "reward.functions=[rlfuse.rewards.verifiers.numeric:score]",
        "algorithm=grpo",
        f"data.train_batch_size={32 * devices}",
        f"actor.ppo_mini_batch_size={16 * devices}",
        "rollout.n=8",
        "data.max_prompt_length=1024",
        "data.max_response_length=4096",
        f"trainer.nnodes={cluster.nodes}",
        "trainer.n_gpus_per_node=8",
        "cluster.device=cuda",
    ]
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(compose_job(words))
    shapes = {"actor": shape} | ({"reference": shape} if config.uses_reference else {})
    lengths = lengths_of(config, 1024)
    return Job(config, shapes, {}, cluster, cluster.hardware(), lengths, 256, axes_of(config, shape, cluster))


def row(name: str, devices: int, job: Job, seconds: float) -> str:
    shape, clock = job.shapes["actor"], time.process_time
    began = clock()
    facts = Facts(attention_heads=shape.heads, layers=len(shape.layers), video=shape.tower > 0, cuda=True)
    found = search(job, facts, SEARCH_SHARE * seconds, patience=PATIENCE, clock=clock)
    if not found.plans:
        return f"| {name} | {devices} | none fits: {found.nearest[1][0]} |"
    found, _ = refine(job, found, facts, REFINE_SHARE * seconds - (clock() - began), clock)
    took, best = clock() - began, found.plans[0]
    tokens = sum(job.lengths) + len(job.lengths) * job.prompt_tokens
    used = dict(best.settings)
    slots = used["trainer.nnodes"] * used["trainer.n_gpus_per_node"]
    config, memory = job.with_settings(best.settings)
    training = job.simulated(config, memory, "serial").training
    flops = 6 * (shape.passed * tokens + shape.head * sum(job.lengths))
    mfu = flops / training / slots / (job.cluster.peak_tflops * 1e12)
    again = "yes" if used["model.enable_gradient_checkpointing"] else "no"
    peak = max(map(best.memory.total, best.memory.phases)) / GIB
    least = f"{found.bound_s:.1f}" if found.bound_s else "not known"
    return (
        f"| {name} | {devices} | {name_of(job, best)} | {used['actor.ppo_max_token_len_per_gpu']} | {again} | "
        f"{best.seconds.step:.1f} | {mfu:.1%} | {peak:.1f} | {least} | {took:.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
