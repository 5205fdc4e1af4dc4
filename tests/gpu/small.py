"""Small random models, and ragged rows with the tensors that the policy loss reads."""

from functools import partial

import numpy as np
import torch
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rlfuse.config.schema import Config
from rlfuse.samples import Row

VOCABULARY = 96


def policy_folder(folder, hidden=64, layers=2, head=32):
    """Save a random Qwen2; flash attention needs a head size that is a multiple of 8."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // head, num_key_value_heads=max(1, hidden // (2 * head)),
        max_position_embeddings=1024, initializer_range=0.1, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def served_folder(folder):
    """Save a model that vLLM can serve, with a tokenizer of the same vocabulary size and heads of 64."""
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Qwen2Tokenizer(vocab=special, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_tokens([AddedToken(f"w{i}", lstrip=True, normalized=False) for i in range(3, VOCABULARY)])
    tokenizer.save_pretrained(folder)
    return policy_folder(folder, hidden=256, head=64)


def settings(folder, dtype="float32"):
    """Return a job configuration for the model in `folder`."""
    config = Config()
    config.model.path, config.model.dtype = str(folder), dtype
    config.data.max_response_length = 64
    config.actor.grad_clip, config.actor.optim.lr = 0.0, 1e-3
    config.actor.use_kl_loss, config.actor.kl_loss_coef = True, 0.1
    return config


def _normal(rng, count, mean):
    return rng.normal(mean, 0.3, count).astype(np.float32)


def make_rows(count, seed=0, longest=48):
    """Return ragged rows; every second one has the prompt of the previous one."""
    rng = np.random.default_rng(seed)
    rows, prompt = [], None
    for i in range(count):
        if i % 2 == 0:
            prompt = rng.integers(3, VOCABULARY, rng.integers(2, longest)).astype(np.int32)
        response = rng.integers(3, VOCABULARY, rng.integers(2, longest)).astype(np.int32)
        draw = partial(_normal, rng, len(response))
        tensors = {"old_log_probs": draw(-4.5), "advantages": draw(0), "ref_log_probs": draw(-4.5)}
        rows.append(Row(prompt, response, tensors, id=str(i)))
    return rows
