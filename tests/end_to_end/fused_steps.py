"""A job that repeats its first steps from the same weights under each policy, and records each of them.

Run by driven_jobs.py for test_fusion_policies.py.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from rlfuse.config.compose import load
from rlfuse.costs.rates import Rates
from rlfuse.engines.rollout.engine_actor import engine_actor
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.lengths import Lengths
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.selection import Selection
from rlfuse.observe.metrics import fusion_metrics
from rlfuse.run.build import run

ONE_SLOT = Settings(threshold=0.9, max_decode_slowdown=1e3, longest_first=False)
"""Consolidates the tail early, on one slot."""
FREE = {"step_per_sequence_s": 0.0, "move_s": 0.0, "prefill_tokens_per_s": 1e9, "score_call_s": 0, "train_call_s": 0}
"""Costs under which moves and calls for a single sample are always worth it."""
SLOW_PREFILL = 40.0
"""Tokens per second at which a separate prefill engine is always worth it."""
FEW = 8
"""Samples per engine, half the usual number; lengths are predicted from those of `serial`."""
CASES = {
    "serial": ("serial", Settings(), "exact"),
    "stream": ("stream", Settings(), "exact"),
    "stream with credits": ("stream", Settings(credit_samples=3), "exact"),
    "rlhfuse": ("rlhfuse", ONE_SLOT, "exact"),
    "adaptive": ("adaptive", ONE_SLOT, "exact"),
    "adaptive with KV caches": ("adaptive", ONE_SLOT, "exact"),
    "adaptive again": ("adaptive", ONE_SLOT, "exact"),
    "adaptive, few at once": ("adaptive", Settings(threshold=0.0, max_sequences=FEW), "exact"),
    "apart with KV caches": ("adaptive", Settings(threshold=0.0, prefill_share=0.5), "exact"),
    "apart in stages with KV caches": ("serial", Settings(prefill_share=0.5), "exact"),
    "over_sampling": ("adaptive", Settings(), "over_sampling"),
    "tail_batching": ("adaptive", Settings(), "tail_batching"),
    "partial_rollout": ("adaptive", Settings(), "partial_rollout"),
    "one_step_off": ("adaptive", Settings(), "one_step_off"),
}
OF_EVERY_BACKEND = ("serial", "stream", "rlhfuse", "adaptive", "adaptive again", "adaptive, few at once")
OF_EVERY_BACKEND += ("partial_rollout",)
"""Cases run on every backend; the others only add the transfer of KV caches."""
STEPS = {"exact": 1, "tail_batching": 3}
"""Number of steps by kind of data selection; default 2."""


class Steps:
    """Steps of the job, run on its controller."""

    def __init__(self, folder: Path):
        self.folder, self.found = folder, {}

    async def drive(self, controller, _):
        """Run every case from the same weights, on the same prompts."""
        self.controller = controller
        controller.tuning.rates = Rates(2, measured=False)  # with zero costs a slot measured as slow would get nothing
        await controller.engines.trainer.save(self.folder)
        moves = engine_actor(controller.config.rollout.name).capabilities.can_move_kv
        for case in CASES if moves else OF_EVERY_BACKEND:
            policy, settings, data = CASES[case]
            await controller.engines.trainer.load(self.folder)
            controller.policy, groups = POLICIES[policy], controller.groups
            groups.prompts.taken = 0
            batch = controller.config.data.train_batch_size
            groups.selection = Selection(data, 0.5, batch, groups.prompts)
            link = 1e30 if "KV" in case else 0.0
            costs = FREE | ({"prefill_tokens_per_s": SLOW_PREFILL} if "apart" in case else {})
            controller.tuning.costs = replace(controller.tuning.costs, **costs, link_bytes_per_s=link)
            controller.tuning.fixed = settings
            controller.tuning.lengths = Lengths(controller.config.data.max_response_length)
            if settings.max_sequences == FEW:
                controller.tuning.lengths.learn(self.found["serial"][0]["lengths"])
            await controller.update_weights(0)
            self.found[case] = [await self.step(step) for step in range(1, 1 + STEPS.get(data, 2))]

    async def step(self, number):
        """Run a step; return everything about it that tests check."""
        controller, noted = self.controller, self.controller.metrics._notes
        with controller.journal.recorder.span("step", step=number):
            board = await controller.learn(number)
            await controller.update_weights(number)
        spans = await controller.journal.collect(number)
        metrics = {name: sum(values) / len(values) for name, values in noted.items()}
        noted.clear()
        samples = board.needed_samples()
        return {
            "metrics": metrics,
            "lengths": board.response_lengths(),
            "at_once": most_at_once([span for span in spans if span.kind == "generate"]),
            "responses": {sample.id: sample.response.token_ids.tolist() for sample in samples},
            "versions": {sample.id: sample.response.weight_version for sample in samples},
            "advantages": {s.id: s.tensors["advantages"].tolist() for g in board.groups_to_train() for s in g.samples},
            "trained": sorted(s for span in spans if span.kind == "backward" for s in span.samples),
            "carried": [s.attributes["carry"] for s in spans if s.kind == "move" and s.where == "driver"],
            "moved": [s.samples for s in spans if s.kind == "move" and s.where == "driver"],
            "routes": [(s.attributes["source"], s.attributes["target"]) for s in spans if s.kind == "move"],
            "left": [group.prompt.index for group in board.unneeded_groups()[0]],
            "prompts": [group.prompt.index for group in board.groups],
        } | self.described(spans)

    def described(self, spans):
        """Return further facts of a step, from its events."""
        return {"fusion": fusion_metrics(spans, slots=2)}


def most_at_once(spans):
    """Return the maximum number of samples that one engine held at once."""
    most = 0
    for engine in {span.where for span in spans}:
        held = [span for span in spans if span.where == engine]
        most = max(most, *(sum(other.start <= span.start < other.end for other in held) for span in held))
    return most


def perform(words):
    """Run the job; return case -> its steps."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder))
        run(load(words), steps.drive)
    return steps.found
