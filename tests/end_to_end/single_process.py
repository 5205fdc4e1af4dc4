"""Single-process reference for pipelines: small random models, ragged rows, and AdamW steps in plain torch."""

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

from rlfuse.algorithms.losses import loss_divisor
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.micro_batch_losses import actor_loss, critic_loss, log_probs
from rlfuse.engines.trainer.micro_batches import split_evenly
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import load_critic, load_policy, response_values
from rlfuse.engines.trainer.rank_group import step_metrics
from rlfuse.samples import Row

VOCABULARY, LR = 60, 1e-3
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
}


def write_models(folder):
    """Write random models of four layers and of two (for critics); return {(family, layers): folder}."""
    torch.manual_seed(0)
    made = {}
    small = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=128, initializer_range=0.05,
    )  # fmt: skip
    for family, (config, model, more) in FAMILIES.items():
        for layers in (4, 2):
            made[family, layers] = str(folder / f"{family}_{layers}")
            model(config(**small, **more, num_hidden_layers=layers)).save_pretrained(made[family, layers])
    return made


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
    """Return ragged rows with all tensors that the two losses read."""
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


class Whole:
    """A whole model in one process, with AdamW of plain torch."""

    def __init__(self, config, name):
        self.config, self.name = config, name
        load = load_policy if name == "actor" else load_critic
        self.model = load(config.model.path if name == "actor" else config.critic.path, config.model)
        optim = config.actor.optim if name == "actor" else config.critic.optim
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=optim.weight_decay)

    def step(self, rows):
        """Run a step; return the gradient before clipping, and the metrics of the mini-batch."""
        count = loss_divisor(lengths(rows), self.config.actor.loss_agg_mode, self.config.data.max_response_length)
        loss, sums = actor_loss if self.name == "actor" else critic_loss, {}
        for part in split_evenly([row.tokens for row in rows], 1, 4)[0]:
            summed, found = loss(self.config, self.model, collate([rows[i] for i in part], packed=True))
            (summed / count).backward()
            sums = {key: sums.get(key, 0.0) + float(value) for key, value in found.items()}
        gradient = {key: p.grad.clone() for key, p in self.model.named_parameters()}
        limit = self.config.actor.grad_clip or 1e9
        facts = {"grad_norm": float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradient, step_metrics(self.name, [(sums, facts)], count, lengths(rows))

    @torch.no_grad()
    def score(self, rows):
        """Return the log-probs or values of each row."""
        found = []
        for first in range(0, len(rows), 16):
            batch = collate(rows[first : first + 16], packed=True)
            values = self.name == "critic"
            flat = response_values(self.model, batch) if values else log_probs(self.config, self.model, batch)
            found += batch.split(flat)
        return found


class ThreeSteps:
    """Three steps of a model: gradients, norms, and the parameters after them."""

    def __init__(self, config, name):
        whole = Whole(config, name)
        self.gradients, metrics = zip(*(whole.step(rows) for rows in BATCHES), strict=True)
        self.norms = [each[f"{name}/grad_norm"] for each in metrics]
        self.parameters = {key: p.detach() for key, p in whole.model.named_parameters()}
