"""Compare a response with a reference answer by a generative judge (Seed1.5-VL, arXiv 2505.07062).

    template with (response, reference) -> P(A) of (A, B) = p
    template with (reference, response) -> P(B) of (A, B) = q        reward = (p + q) / 2, between 0 and 1

Averaging both orders cancels a preference for a position. Probabilities are over the two verdict tokens only. Text is
never truncated; a sample without a verdict (no reference, prompt too long) is a `RewardFailure`.
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
ALTERNATIVE = "blind=true, where question and answers are enough, or an entry with sources that show nothing"


class Judge:
    """Compares each response with a reference."""

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
        """Looks at what can be seen without loading; RewardError for what is wrong.

        `template`: what the judge reads, with {prompt}, {a} and {b}; as a user's message, where it has a chat template
        (`chat_template_kwargs`, for instance {enable_thinking: false}: its first token is what counts).
        `verdicts`: what it says for a and for b, a token each.
        `reference`: the column with the answer to compare with, shown as it is.
        `dtype`: auto, as vLLM chooses (16 bits), or as of model.dtype.
        `engine_kwargs`: more of vLLM's EngineArgs.
        `blind`: it goes by question and answers, and is not shown the clips and images of a row.
        """
        model = resolve_model_path(model, "model")
        if missing := [f"{{{place}}}" for place in PLACEHOLDERS if f"{{{place}}}" not in template]:
            raise RewardError(f"template: lacks {', '.join(missing)}; it has to show the question and both answers")
        if len(verdicts) != 2 or len(set(verdicts)) != 2 or not all(isinstance(v, str) and v for v in verdicts):
            told = f"verdicts: got {verdicts}; give two different texts, for the first answer and the second"
            raise RewardError(told)
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
        sight = self._new_sight()
        with sight.served() as model:
            started = engine(replace(self._settings, model=model))
        sight.start(started)
        self._visual_inputs, self._tokenizer = sight, started.tokenizer
        self._tokens = [self._token(verdict) for verdict in self._verdicts]
        self._engine = started

    def score(self, samples: Sequence[Item]) -> list[Reward | RewardFailure]:
        return [result for few in split_by_visual_tokens(samples) for result in self._compared(few)]

    def _compared(self, samples: Sequence[Item]) -> list[Reward | RewardFailure]:
        orders = [self._orders(item) for item in samples]
        asked = [prompt for pair in orders if not isinstance(pair, RewardFailure) for prompt in pair]
        said = self._engine.log_probs(asked, self._tokens) if asked else []
        verdicts = map(verdict, said[::2], said[1::2])
        return [pair if isinstance(pair, RewardFailure) else next(verdicts) for pair in orders]

    def unsupported_reason(self, visual: Sequence[Visual]) -> str | None:
        """Return why it can't score a row with these clips and images, else None. Loads no weights."""
        if self._blind:
            return None
        self._visual_inputs = self._visual_inputs or self._new_sight()
        return self._visual_inputs.unsupported_reason(visual)

    def _new_sight(self) -> VisualInputs:
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
            return _failure(f"{self._reference} is {reference!r}; a judge compares with a text")
        contents = [message.get("content") for message in item.messages]
        if not all(isinstance(content, str) for content in contents):
            return _failure("the prompt has parts other than text, which a judge can't be shown")
        roles = [message.get("role", "user") for message in item.messages]
        several = [f"{role}: {content}" for role, content in zip(roles, contents, strict=True)]
        question = contents[0] if len(contents) == 1 else "\n\n".join(several)
        if not visual:
            shown, question = question, self._visual_inputs.escape_markers(question)
            if shown != question and item.lacks_visual and not self._blind:
                return _failure(
                    "the question has the marker of a clip or image, and none came along, as none does from saved "
                    "samples; blind=true has the judge go by the text"
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
            f"question and answers are {longest} tokens of the judge, which takes {self._engine.context - 1}: give a "
            "judge of more context (max_model_len), or lower data.max_response_length"
        )

    def _prompt(self, question: str, a: str, b: str, visual: Sequence[Visual]) -> VideoPrompt:
        shown = {"{prompt}": question, "{a}": a, "{b}": b}
        text = re.sub(r"\{(prompt|a|b)\}", lambda place: shown[place[0]], self._template)
        if self._tokenizer.chat_template is None:
            return self._visual_inputs.assemble(text, visual, special=True)
        message = [{"role": "user", "content": text}]
        whole = self._tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, **self._chat_template_kwargs
        )
        return self._visual_inputs.assemble(whole, visual, special=False)

    def _token(self, verdict: str) -> int:
        tokens = self._tokenizer.encode(verdict, add_special_tokens=False)
        if len(tokens) == 1 and tokens[0] != self._tokenizer.unk_token_id:
            return tokens[0]
        raise RewardError(
            f"verdicts: {verdict!r} is {len(tokens) or 'no'} token(s) of {self._settings.model}; it has to be one "
            "that the judge knows. A blank in front may be a part of it"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the engine."""
        return self.__dict__ | {"_engine": None, "_tokenizer": None, "_sight": None}


def verdict(forward: Sequence[float], backward: Sequence[float]) -> Reward | RewardFailure:
    """Return the reward from both orders' log-probs. `consistency`: both prefer the same answer; `position`:
    probability of the first place; `said`: of a verdict at all (near 0: wrong template or verdicts)."""
    masses = [math.exp(a) + math.exp(b) for a, b in (forward, backward)]
    if not all(math.isfinite(mass) and mass > 0 for mass in masses):
        return _failure(f"the log-probs of the verdicts are {list(forward)} and {list(backward)}; check the judge")
    first = 1 / (1 + math.exp(min(forward[1] - forward[0], 700.0)))
    second = 1 / (1 + math.exp(min(backward[0] - backward[1], 700.0)))
    parts = {
        "consistency": float((first - 0.5) * (second - 0.5) > 0),
        "position": (first + 1 - second) / 2,
        "said": sum(masses) / 2,
    }
    return Reward((first + second) / 2, parts)


def _failure(why: str) -> RewardFailure:
    return RewardFailure("", why)
