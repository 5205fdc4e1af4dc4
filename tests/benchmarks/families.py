"""Model families on which engine and trainer agree: GRPO and PPO jobs of tiny random models, two steps each.

    python tests/benchmarks/families.py [--only Gemma2 ...] [--out rlfuse/engines/FAMILIES.md]

Runs real jobs in float32 on one slot of this host. Reports the largest difference between the log-probs of sampled
tokens by engine and by trainer, after the first weight push and after each update, or the message with which the job
was refused at startup. Takes one or two minutes per family; writes the table of the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from rlfuse.observe.tracking import read_metrics
from rlfuse.tasks.clips import SIGNS, WORDS, Clips, Kind, write_task
from rlfuse.tasks.small_video_models import SmallModel, byte_tokenizer, write_small_video_llama3

BOUND = 1e-5
LOG_PROBS_DIFF = "training/rollout_log_probs_diff_max"
VOCABULARY = 200
WIDE = dict(  # the smallest head size of vLLM's CPU kernels is 32
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=1024
)
LLAMA = WIDE | dict(intermediate_size=128, num_key_value_heads=2)
EXPERTS = LLAMA | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
GPT = dict(n_embd=128, n_layer=2, n_head=4, n_positions=1024)
WINDOW = 24
"""Window in tokens; rows are longer."""


@dataclass(frozen=True, slots=True)
class Family:
    """Sizes of a tiny model, and the distinctive trait of its family."""

    trait: str
    sizes: dict


FAMILIES = {
    "Llama": Family("", LLAMA),
    "Qwen2": Family("biases of q, k, v", LLAMA),
    "Qwen3": Family("norms of q and k", LLAMA | dict(head_dim=32)),
    "Mistral": Family("sliding window", LLAMA | dict(sliding_window=WINDOW, head_dim=32)),
    "Phi3": Family("fused q, k, v", LLAMA | dict(pad_token_id=0)),
    "Gemma": Family("tied, scaled embeddings", LLAMA | dict(head_dim=32, tie_word_embeddings=True)),
    "Gemma2": Family(
        "soft-capped, every other layer's window slides",
        LLAMA | dict(head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0),
    ),
    "Gemma3Text": Family(
        "norms of q and k, windows slide",
        LLAMA | dict(head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
    ),
    "Granite": Family("multipliers", LLAMA | dict(embedding_multiplier=2.0, logits_scaling=2.0)),
    "Olmo2": Family("norms behind layers", LLAMA),
    "StableLm": Family("part of a head rotates", LLAMA),
    "Starcoder2": Family("layer norms with biases, tied", LLAMA | dict(sliding_window=None)),
    "GPT2": Family("learned positions, tied", GPT),
    "GPTBigCode": Family("multi-query", GPT | dict(multi_query=True)),
    "GPTNeoX": Family("attention and MLP side by side", WIDE | dict(intermediate_size=128)),
    "OPT": Family("learned positions", WIDE | dict(ffn_dim=128, word_embed_proj_dim=128)),
    "Falcon": Family("multi-query", WIDE | dict(multi_query=True, new_decoder_architecture=False)),
    "Bloom": Family("ALiBi", dict(hidden_size=128, n_layer=2, n_head=4)),
    "Mixtral": Family("experts", EXPERTS),
    "Qwen2Moe": Family(
        "experts, one shared", EXPERTS | dict(shared_expert_intermediate_size=64, decoder_sparse_step=1)
    ),
    "Qwen3Moe": Family("experts, norms of q and k", EXPERTS | dict(head_dim=32, decoder_sparse_step=1)),
    "Olmoe": Family("experts, norms of q and k", EXPERTS),
    "GptOss": Family("experts, sinks, windows slide", EXPERTS | dict(head_dim=32, sliding_window=WINDOW)),
    "DeepseekV2": Family(
        "latent attention, experts",
        EXPERTS | dict(
            num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=32, qk_rope_head_dim=64, qk_nope_head_dim=128,
            v_head_dim=128, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        ),
    ),
    "Mamba": Family("a state instead of attention", dict(hidden_size=128, num_hidden_layers=2, state_size=8)),
}  # fmt: skip
VIDEO = "VideoLLaMA3"
REWARD = '''
def even(data_source, solution_str, ground_truth, extra_info=None):
    """Share of even characters; any text has a reward."""
    return sum(ord(letter) % 2 == 0 for letter in solution_str) / max(1, len(solution_str))
'''


def write_text_model(folder: Path, name: str) -> dict[str, object]:
    """Write a random model with a tokenizer of 200 words, and rows of prompts; return the settings of its job."""
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Qwen2Tokenizer(vocab=special, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_tokens([AddedToken(f"w{i}", lstrip=True, normalized=False) for i in range(3, VOCABULARY)])
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    ids = dict(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    sizes = dict(vocab_size=VOCABULARY, initializer_range=0.06) | ids | FAMILIES[name].sizes
    config = getattr(transformers, f"{name}Config")(**sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    rows = [{"prompt": " ".join(f"w{3 + i + k}" for k in range(8)), "answer": str(i)} for i in range(32)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data.train_files": f"[{folder}/train.jsonl]",
        "data.max_prompt_length": 16,
        "data.max_response_length": 48,
        "rollout.kv_cache_memory_mb": 32,
    }


def write_video_model(folder: Path, name: str) -> dict[str, object]:
    """Write a small VideoLLaMA3 and clips for it; return the settings of its job."""
    write_task(folder, Clips(train=8, val=2, kinds=(Kind.ORDER,), shortest_s=10, longest_s=20))
    write_small_video_llama3(
        folder / "model", SmallModel(heads=4, layers=2, tower_heads=2), byte_tokenizer([*WORDS, *SIGNS])
    )
    return {
        "data.train_files": f"[{folder}/train.parquet]",
        "data.max_prompt_length": 600,
        "data.max_response_length": 16,
        "rollout.kv_cache_memory_mb": 64,
    }


def run_job(folder: Path, settings: dict[str, object], algorithm: str) -> str:
    """Return the text of a cell of the table."""
    settings = settings | {
        "algorithm": algorithm,
        "model.path": folder / "model",
        "model.dtype": "float32",
        "data.train_batch_size": 4,
        "actor.ppo_mini_batch_size": 4,
        "actor.optim.lr": 1e-3,
        "rollout.n": 4 if algorithm == "grpo" else 2,
        "reward.functions": f"[{folder}/reward.py:even]",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 3,  # the third step only checks the push of the second update
        "trainer.logger": "[console]",
        "trainer.default_local_dir": folder / "runs",
        "trainer.experiment_name": algorithm,
        "cluster.device": "cpu",
    }
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "rlfuse.cli", "train", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    (folder / f"{algorithm}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return f"refused: {_message(done.stdout + done.stderr, folder)}"
    (run,) = (folder / "runs").glob(f"*/{algorithm}")
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    if min(row["actor/grad_norm"] for row in rows) <= 0 or len(rows) != 3:
        return f"nothing was learned in {len(rows)} steps"
    first = re.search(r"by rollout engines and trainer differ by at most (\S+)", done.stdout)
    difference = max(*(row[LOG_PROBS_DIFF] for row in rows), float(first[1]) if first else float("nan"))
    return f"{difference:.0e}" if difference < BOUND else f"**{difference:.0e}**"


def _message(text: str, folder: Path) -> str:
    """Return the line with the reason."""
    lines = [line.strip() for line in text.replace(f"={folder}/model", "").splitlines() if line.strip()]
    reasons = [line for line in lines if "model.path" in line or "critic.path" in line or "rlfuse:" in line]
    return (reasons or lines or ["no word"])[0].removeprefix("1. ").partition("; choose")[0]


def judge(name: str, write: Callable[[Path, str], dict[str, object]], keep: Path | None) -> list[str]:
    """Return both cells of a family."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep or Path(temporary)) / name
        folder.mkdir(parents=True)
        try:
            settings = write(folder, name)
        except (ImportError, AttributeError, ValueError) as error:
            return [f"no model: {type(error).__name__}: {error}"[:200]] * 2
        return [run_job(folder, settings, algorithm) for algorithm in ("grpo", "ppo")]


def table(found: dict[str, list[str]]) -> str:
    """Return the page."""
    lines = [
        "# Families of models",
        "",
        "The largest difference, in nats, between the log-probs of sampled tokens by rollout engine and trainer: tiny",
        "random models in float32 on CPUs, after the first weights and after each of two updates. Made by",
        "`python tests/benchmarks/families.py`; bold is above 1e-5. Every run checks its own model after the first",
        "weights (`rollout.on_mismatch`), so one of another family is stopped if it would go wrong.",
        "",
        "| family | particular | GRPO | PPO |",
        "|---|---|---|---|",
    ]
    traits = {name: family.trait for name, family in FAMILIES.items()} | {VIDEO: "clips through a vision tower"}
    for name, (grpo, ppo) in found.items():
        both = grpo.startswith("refused") and ppo.startswith("refused")
        lines.append(f"| {name} | {traits[name]} | {grpo} | {'refused' if both else ppo} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these families")
    parser.add_argument("--out", type=Path, help="where to write the table")
    parser.add_argument("--keep", type=Path, help="keep models, runs and what they printed in this folder")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = {}
    for name in arguments.only or [*FAMILIES, VIDEO]:
        found[name] = judge(name, write_video_model if name == VIDEO else write_text_model, arguments.keep)
        print(f"{name:14} {'   '.join(found[name])}", flush=True)
    if arguments.out:
        arguments.out.write_text(table(found))


if __name__ == "__main__":
    main()
