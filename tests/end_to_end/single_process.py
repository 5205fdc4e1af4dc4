"""What pipelines are compared with: small random models, ragged rows, and three AdamW steps of plain torch on them."""

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlfuse.algorithms.losses import loss_count
from rlfuse.config.schema import Config
from rlfuse.engines.batching import numbered
from rlfuse.engines.models import collate, load_critic, load_policy
from rlfuse.engines.optimizing import zero_value_head
from rlfuse.engines.passes import actor_loss, critic_loss
from rlfuse.samples import Row

VOCABULARY, LR = 60, 1e-3
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
}


def settings(folders, family="qwen2", critic_layers=2, clip=0.0, dtype="float32"):
    config = Config()
    config.model.path, config.model.dtype = folders[family, 4], dtype
    config.critic.path = folders[family, critic_layers]
    config.data.max_response_length, config.cluster.timeout_s = 32, 120
    actor = config.actor
    actor.grad_clip, actor.optim.weight_decay, actor.optim.lr = clip, 0.01, LR
    actor.use_kl_loss, actor.kl_loss_coef, actor.entropy_coeff = True, 0.1, 0.01
    config.critic.optim.lr = LR
    return config


def make_rows(count, seed):
    """Ragged rows with everything that the two losses read."""
    rng = np.random.default_rng(seed)

    def row(i):
        prompt, response = (rng.integers(3, VOCABULARY, rng.integers(2, most)).astype(np.int32) for most in (8, 24))
        draw = lambda loc: rng.normal(loc, 0.3, len(response)).astype(np.float32)  # noqa: E731
        tensors = {"old_log_probs": draw(-4), "advantages": draw(0), "ref_log_probs": draw(-4)}
        return Row(prompt, response, tensors | {"values": draw(0), "returns": draw(0.2)}, id=str(i))

    return [row(i) for i in range(count)]


def lengths(rows):
    return [len(row.response_ids) for row in rows]


BATCHES = [make_rows(11, seed) for seed in (3, 4, 5)]


class Serial:
    """One process, plain torch: what three steps of AdamW make of a model, the gradient of each step on the way."""

    def __init__(self, config, name):
        load = load_policy if name == "actor" else load_critic
        path = config.model.path if name == "actor" else config.critic.path
        model = load(path, config.model, "cpu")
        if name == "critic":
            zero_value_head(model)
        loss = actor_loss if name == "actor" else critic_loss
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=config.actor.optim.weight_decay)
        self.gradients, self.norms = [], []
        for rows in BATCHES:
            count = loss_count(lengths(rows), config.actor.loss_agg_mode, config.data.max_response_length)
            for part in numbered([row.tokens for row in rows], 1, 4)[0]:
                batch = collate([rows[i] for i in part], packed=True)
                (loss(config, model, batch)[0] / count).backward()
            self.gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.actor.grad_clip or 1e9)))
            optimizer.step()
            optimizer.zero_grad()
        self.parameters = {key: p.detach() for key, p in model.named_parameters()}
