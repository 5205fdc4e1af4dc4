"""Compare a response with a reference answer by a generative judge, LLM-as-a-judge (Seed1.5-VL, arXiv 2505.07062).

    template with (response, reference) -> P(A) of (A, B) = p
    template with (reference, response) -> P(B) of (A, B) = q        reward = (p + q) / 2, between 0 and 1

Averaging both orders cancels position bias. Probabilities are normalised over the two verdict tokens. Text is never
truncated; a sample without a verdict (no reference, prompt too long) is a `RewardFailure`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlfuse.engines.vllm.offline_engine import EngineSettings, OfflineEngine, engine
from rlfuse.errors import RewardError
from rlfuse.rewards.api.items import Item
from rlfuse.rewards.api.results import failure
from rlfuse.rewards.models.classifier import resolve_model_path
from rlfuse.rewards.models.visual_inputs import VisualInputs, split_by_visual_tokens
from rlfuse.samples import Reward, RewardFailure, Visual

if TYPE_CHECKING:
    from rlfuse.video.prompt import VideoPrompt

TEMPLATE = """\
Compare two answers to a question.

[Question]
{prompt}

[Answer A]
{a}

[Answer B]
{b}

Which answer is better: more correct, helpful and to the point? Say A or B, and nothing else."""
PLACEHOLDERS = ("prompt", "a", "b")
ALTERNATIVE = "set blind=true if question and answers suffice, or set sources to data without clips and images"


class Judge:
    """Reward function that compares each response with a reference answer."""

    def __init__(
        self,
        model: str,
        template: str = TEMPLATE,
        verdicts: Sequence[str] = ("A", "B"),
        reference: str = "ground_truth",
        dtype: str = "auto",
        max_model_len: int | None = None,
        kv_cache_memory_mb: int = 256,
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        blind: bool = False,
    ):
        """Check the arguments without loading the model. Raises RewardError.

        `template`: prompt of the judge with {prompt}, {a} and {b}; a user message if the model has a chat template.
        `chat_template_kwargs`: for instance {enable_thinking: false}, because only the first generated token counts.
        `verdicts`: texts for "a is better" and "b is better", one token each.
        `reference`: column with the reference answer.
        `dtype`: auto (chosen by vLLM, 16 bits) or a value of model.dtype.
        `engine_kwargs`: further EngineArgs of vLLM.
        `blind`: judge by question and answers only, without the clips and images of the row.
        """
        model = resolve_model_path(model, "model")
        if missing := [f"{{{place}}}" for place in PLACEHOLDERS if f"{{{place}}}" not in template]:
            raise RewardError(f"template: {', '.join(missing)} is missing; add the question and both answers")
        if len(verdicts) != 2 or len(set(verdicts)) != 2 or not all(isinstance(v, str) and v for v in verdicts):
            raise RewardError(f"verdicts: got {verdicts}; use two different texts, for the first and the second answer")
        more = json.dumps(engine_kwargs or {}, sort_keys=True)
        self._settings = EngineSettings(
            model, dtype, max_model_len, kv_cache_memory_mb, trust_remote_code, engine_kwargs=more
        )
        self._template, self._verdicts, self._reference = template, tuple(verdicts), reference
        self._chat_template_kwargs = chat_template_kwargs or {}
        self._blind = blind
        self._engine: OfflineEngine | None = None
        self._visual_inputs: VisualInputs | None = None

    def start(self) -> None:
        if self._engine is not None:
            return
        visual_inputs = self._load_visual_inputs()
        with visual_inputs.model_folder() as model:
            started = engine(replace(self._settings, model=model))
        visual_inputs.start(started)
        self._visual_inputs, self._tokenizer = visual_inputs, started.tokenizer
        self._tokens = [self._token(verdict) for verdict in self._verdicts]
        self._engine = started

    def score(self, samples: Sequence[Item]) -> list[Reward | RewardFailure]:
        return [result for few in split_by_visual_tokens(samples) for result in self._compared(few)]

    def _compared(self, samples: Sequence[Item]) -> list[Reward | RewardFailure]:
        orders = [self._orders(item) for item in samples]
        prompts = [prompt for pair in orders if not isinstance(pair, RewardFailure) for prompt in pair]
        log_probs = self._engine.log_probs(prompts, self._tokens) if prompts else []
        verdicts = map(verdict, log_probs[::2], log_probs[1::2])
        return [pair if isinstance(pair, RewardFailure) else next(verdicts) for pair in orders]

    def unsupported_reason(self, visual: Sequence[Visual]) -> str | None:
        """Return why the judge can't score a row with these clips and images, or None. Loads no weights."""
        if self._blind:
            return None
        self._visual_inputs = self._visual_inputs or self._load_visual_inputs()
        return self._visual_inputs.unsupported_reason(visual)

    def _load_visual_inputs(self) -> VisualInputs:
        return VisualInputs(self._settings.model, self._settings.trust_remote_code, key="model", otherwise=ALTERNATIVE)

    def _orders(self, item: Item) -> list[dict[str, Any]] | RewardFailure:
        visual = () if self._blind else item.visual
        if visual and (why := self.unsupported_reason(visual)):
            return _failure(why)
        try:
            reference = item.column(self._reference)
        except KeyError:
            return _failure(f"the row has no column {self._reference!r}; its columns: {sorted(item.columns)}")
        if reference is None or not isinstance(reference, str | int | float):
            return _failure(f"{self._reference} is {reference!r}; the reference answer must be a text or a number")
        contents = [message.get("content") for message in item.messages]
        if not all(isinstance(content, str) for content in contents):
            return _failure("the prompt has parts other than text, which the judge does not support")
        roles = [message.get("role", "user") for message in item.messages]
        several = [f"{role}: {content}" for role, content in zip(roles, contents, strict=True)]
        question = contents[0] if len(contents) == 1 else "\n\n".join(several)
        if not visual:
            shown, question = question, self._visual_inputs.escape_markers(question)
            if shown != question and item.lacks_visual and not self._blind:
                return _failure(
                    "the question has a marker of a clip or image that is not available, as in saved samples; set "
                    "blind=true to judge by the text only"
                )
        answers = [self._visual_inputs.escape_markers(answer).strip() for answer in (item.response, str(reference))]
        try:
            pair = [self._prompt(question.strip(), *order, visual) for order in (answers, answers[::-1])]
            longest = max(len(made.token_ids) for made in pair)
            if longest < self._engine.context:
                return [self._visual_inputs.prompt(made, visual) for made in pair]
        except Exception as error:
            return failure("", error)
        return _failure(
            f"question and answers are {longest} tokens for the judge, which accepts {self._engine.context - 1}: use a "
            "judge with a longer context (max_model_len), or lower data.max_response_length"
        )

    def _prompt(self, question: str, a: str, b: str, visual: Sequence[Visual]) -> VideoPrompt:
        shown = {"{prompt}": question, "{a}": a, "{b}": b}
        text = re.sub(r"\{(prompt|a|b)\}", lambda place: shown[place[0]], self._template)
        if self._tokenizer.chat_template is None:
            return self._visual_inputs.assemble(text, visual, special=True)
        message = [{"role": "user", "content": text}]
        text_with_template = self._tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, **self._chat_template_kwargs
        )
        return self._visual_inputs.assemble(text_with_template, visual, special=False)

    def _token(self, verdict: str) -> int:
        tokens = self._tokenizer.encode(verdict, add_special_tokens=False)
        if len(tokens) == 1 and tokens[0] != self._tokenizer.unk_token_id:
            return tokens[0]
        raise RewardError(
            f"verdicts: {verdict!r} is {len(tokens) or 'no'} token(s) of {self._settings.model}; it must be one token "
            "in its vocabulary. A leading space may be part of the token"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the engine from pickling."""
        return self.__dict__ | {"_engine": None, "_tokenizer": None, "_visual_inputs": None}


def verdict(forward: Sequence[float], backward: Sequence[float]) -> Reward | RewardFailure:
    """Return the reward from the verdict log-probs of both orders.

    Parts: `consistency`, 1 if both orders prefer the same answer; `position`, probability of the first position;
    `verdict_mass`, probability of either verdict token (near 0: wrong template or verdicts).
    """
    masses = [math.exp(a) + math.exp(b) for a, b in (forward, backward)]
    if not all(math.isfinite(mass) and mass > 0 for mass in masses):
        return _failure(
            f"the log-probs of the verdicts are {list(forward)} and {list(backward)}; check the weights of the judge"
        )
    first = 1 / (1 + math.exp(min(forward[1] - forward[0], 700.0)))
    second = 1 / (1 + math.exp(min(backward[0] - backward[1], 700.0)))
    parts = {
        "consistency": float((first - 0.5) * (second - 0.5) > 0),
        "position": (first + 1 - second) / 2,
        "verdict_mass": sum(masses) / 2,
    }
    return Reward((first + second) / 2, parts)


def _failure(why: str) -> RewardFailure:
    return RewardFailure("", why)
