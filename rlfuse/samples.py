"""Data types of a run: prompts, groups of samples, responses, rewards and the rows that trainer ranks receive.

Role: shared by all modules; plain data without an import of Ray, vLLM or torch.
Invariants:
- a sample is identified by (step, prompt index, rollout index), and its seed derives from these and the run's seed, so
  that *where* and *when* it is generated never changes *what* is sampled;
- every per-token array of a sample has one entry for each response token, 0 where the token is not trainable;
- a response records the version of the weights that generated it.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlfuse.errors import EngineError

if TYPE_CHECKING:
    import torch


class FramePlan(Protocol):
    """The attributes of `video.plan.FramePlan` that encoding reads."""

    times: Sequence[float]
    """Seconds, one per frame."""
    height: int
    width: int
    temporal_patch: int
    merge: int
    tokens: int
    """Visual tokens of the whole clip."""
    kept: bytes | None
    """One byte for each token that the vision tower outputs, 1 for those that are kept; None: all are kept."""
    hash: str
    """Equal for plans with the same frames in the same size."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Handle of a cached clip: bf16 [tokens, hidden] at `path` in a node's shared memory.

    For towers that also feed deeper layers of the text model (DeepStack), `hidden` covers all of these layers.
    """

    key: str
    path: str
    tokens: int
    hidden: int
    copies: tuple[str, ...] = ()
    """Paths of the same rows in the shared memory of other nodes."""

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Map rows `first` to `last` (exclusive) of this node's file, copy-on-write. EngineError if there is none."""
        import torch

        here = next(filter(os.path.exists, (self.path, *self.copies)), self.path)
        try:
            flat = torch.from_file(here, shared=False, size=self.tokens * self.hidden, dtype=torch.bfloat16)
        except RuntimeError as error:
            raise EngineError(
                f"Embedding {self.key} is not at {here}: it was dropped, or it is on another node. Keep it with a "
                "holder in `encode` for as long as it is read."
            ) from error
        return flat.view(self.tokens, self.hidden)[first:last]


@dataclass(frozen=True, slots=True)
class Visual:
    """A clip of a prompt: its frame plan, and a handle of its embedding."""

    positions: np.ndarray
    """int32 [v], ascending: positions of the placeholder tokens in the prompt, one for each row of the embedding."""
    source: Embedding | None = None
    """Handle of bf16 [v, hidden], mapped so that only the rows in use are loaded; None until it is encoded."""
    path: str = ""
    """File of the clip; with the plan, enough to encode it again."""
    plan: FramePlan | None = None
    """Frames, token count and M-RoPE positions, for engine and trainer alike."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of data after tokenisation."""

    index: int
    """Row number in the loaded dataset; stable for a given list of files."""
    token_ids: np.ndarray
    """int32 [prompt tokens], chat template applied."""
    text: str
    """The templated prompt as text."""
    messages: tuple[dict[str, Any], ...]
    """Chat messages of the row (a plain string becomes one user message)."""
    data_source: str
    ground_truth: Any
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of the row, passed to reward functions by name (`extra_info`, `answer`, ...)."""
    visual: tuple[Visual, ...] = ()
    """Clips of the prompt, in order."""


@dataclass(frozen=True, slots=True)
class Response:
    """The response that a rollout engine generated for one sample."""

    token_ids: np.ndarray
    """int32 [T]; includes the end-of-sequence token if the model generated it."""
    log_probs: np.ndarray
    """float32 [T]: log-probs of the sampled tokens under the engine's weights at the sampling temperature."""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    text: str
    """Decoded without special tokens."""
    trainable: np.ndarray | None = None
    """bool [T]: tokens that the model generated. Others, such as a tool's output, are context: they are 0 in every
    per-token array, have no gradient, and do not count in lengths and entropy. None: all are trainable."""

    def __post_init__(self) -> None:
        mask, tokens = self.trainable, len(self.token_ids)
        if mask is not None and (mask.dtype != bool or mask.shape != (tokens,) or not mask.any()):
            raise ValueError(
                f"Response.trainable: got {mask.dtype} {list(mask.shape)}, {int(mask.sum())} of {tokens} tokens set; "
                "it must be bool with one entry per token, at least one of them True"
            )

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: True where a token is trainable."""
        return _mask(self.token_ids, self.trainable)

    @property
    def length(self) -> int:
        """Number of trainable tokens."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Partial:
    """An unfinished response, from which any engine continues with the tokens that the first would have generated."""

    token_ids: np.ndarray
    """int32 [t]; t may be 0."""
    log_probs: np.ndarray
    """float32 [t]."""
    weight_version: int
    """Version of the weights that generated the first token."""
    kv_key: str | None = None
    """Key of its KV cache, if that is transferred too."""
    trainable: np.ndarray | None = None
    """bool [t], as in `Response`."""

    def extended(self, token_ids: np.ndarray, log_probs: np.ndarray, version: int) -> Partial:
        """Return it with tokens appended; `version`: of the weights that generated the first appended token."""
        before = self.trainable
        return Partial(
            np.concatenate([self.token_ids, token_ids]),
            np.concatenate([self.log_probs, log_probs]),
            self.weight_version if len(self.token_ids) else version,
            trainable=None if before is None else np.concatenate([before, np.ones(len(token_ids), dtype=bool)]),
        )


@dataclass(frozen=True, slots=True)
class Reward:
    """A sample's reward: the value used in training, and its named parts."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """Logged values: each function's unscaled score, and all other numbers that it returned."""
    text: str | None = None
    """Optional note for the log, for example the reason for a score of zero."""
    dimensions: dict[str, float] = field(default_factory=dict)
    """Function -> the clipped score that its weight multiplies; 0 if a gate closed. Set by `compose`."""
    gate: str | None = None
    """The gate that closed, so that no further function was called."""
    pred: str | None = None
    """The answer of the response, for majority votes in validation."""
    token_rewards: tuple[float, ...] | None = None
    """Parts of `value` that belong to single tokens, one for each response token; the rest belongs to the last token.
    None: all of it does."""

    @property
    def accuracies(self) -> list[str]:
        """Names of the `acc` parts, one for each function that returns `acc`."""
        return [name for name in self.parts if name.rsplit("/", 1)[-1] == "acc"]

    @property
    def accuracy(self) -> float | None:
        """Mean of its `acc` parts; None if it has none."""
        names = self.accuracies
        return sum(self.parts[name] for name in names) / len(names) if names else None


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A reward function that raised, timed out or lost its process. It never becomes a number."""

    function: str
    message: str
    """One line: the exception, or the time limit that was exceeded."""
    traceback: str = ""


PASSES = {"old_log_prob": ("actor", "old_log_probs"), "ref": ("ref", "ref_log_probs"), "values": ("critic", "values")}
"""Kind of scoring -> the model that runs the forward pass, and the tensor that the pass adds to a sample."""


@dataclass(slots=True)
class Sample:
    """One rollout of a prompt: its seed, and later its response, reward and per-token tensors."""

    prompt: Prompt
    step: int
    rollout_index: int
    seed: int
    response: Response | None = None
    reward: Reward | RewardFailure | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [T] each: `old_log_probs`, `ref_log_probs`, `values`, `token_rewards`, `advantages`, `returns`,
    `selected` (see `algorithms.covariance`) and `loss_mask`, 0 where a token is left out of the actor's loss
    (actor.mask_truncated_completions)."""
    is_baseline: bool = False
    """It is `Group.baseline`."""
    drafts: tuple[np.ndarray, ...] = ()
    """int32 each: an earlier response with the same seed, then others to the prompt. Engines that draft verify their
    tokens instead of decoding token by token; they never change the response."""

    @property
    def id(self) -> str:
        return f"{self.step}/{self.prompt.index}/{self.rollout_index}"

    @property
    def draft_key(self) -> int:
        """32-bit key of responses to the same prompt with the same seed."""
        return zlib.crc32(self.prompt.token_ids.tobytes(), self.seed)

    def require_response(self) -> Response:
        """Return the response. ValueError if the sample has none yet."""
        if self.response is None:
            raise ValueError(f"sample {self.id} has no response yet")
        return self.response

    @property
    def tokens(self) -> int:
        """Number of prompt and response tokens; only the prompt's while there is no response."""
        return len(self.prompt.token_ids) + (len(self.response.token_ids) if self.response else 0)

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T]: tokens in the actor's loss, trainable ones without masked ones."""
        return _loss_mask(self.require_response().mask, self.tensors)

    def trained_tokens(self, model: str) -> int:
        """Return the number of tokens in the loss of `model`: trainable ones, for the actor without masked ones."""
        return _trained_tokens(model, self.require_response().mask, self.tensors)

    def row(self, *names: str) -> Row:
        """Return the row for a trainer rank, with the named per-token arrays. ValueError if a clip is not encoded."""
        tensors, visual = {name: self.tensors[name] for name in names}, self.prompt.visual
        if bare := next((each for each in visual if each.source is None), None):
            raise ValueError(f"sample {self.id}: clip {bare.path} is not encoded; encode it before a forward pass")
        response = self.require_response()
        return Row(self.prompt.token_ids, response.token_ids, tensors, self.id, visual, response.trainable)


def _mask(token_ids: np.ndarray, trainable: np.ndarray | None) -> np.ndarray:
    return np.ones(len(token_ids), dtype=bool) if trainable is None else trainable


def _loss_mask(mask: np.ndarray, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    return mask & (tensors["loss_mask"] > 0) if "loss_mask" in tensors else mask


def _trained_tokens(model: str, mask: np.ndarray, tensors: Mapping[str, np.ndarray]) -> int:
    return int((_loss_mask(mask, tensors) if model == "actor" else mask).sum())


def padded(
    arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray], dtype: np.typing.DTypeLike = np.float32
) -> np.ndarray:
    """Return one array per row as a matrix [B, T], 0 where a mask is False."""
    matrix = np.zeros((len(masks), max(map(len, masks))), dtype)
    for row, array, mask in zip(matrix, arrays, masks, strict=True):
        row[: len(mask)][mask] = array[mask]
    return matrix


def flattened(arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values where masks are True, row after row."""
    return np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)])


def per_row(flat: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Invert `flattened`: return float32 [T of the row] per row, 0 where a mask is False."""
    rows, start = [], 0
    for mask in masks:
        row = np.zeros(len(mask), np.float32)
        end = start + int(mask.sum())
        row[mask], start = flat[start:end], end
        rows.append(row)
    return rows


def prompt_id(sample_id: str) -> str:
    """Return the prefix that the ids of all samples of a prompt share, within a step."""
    return sample_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence for trainer ranks: prompt, response, and per-token arrays of the response."""

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    id: str = ""
    visual: tuple[Visual, ...] = ()
    trainable: np.ndarray | None = None
    """bool [T], as in `Response`."""

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: True where a token is trainable."""
        return _mask(self.response_ids, self.trainable)

    @property
    def length(self) -> int:
        """Number of trainable tokens."""
        return int(self.mask.sum())

    def trained_tokens(self, model: str) -> int:
        """Return the number of tokens in the loss of `model`, as `Sample.trained_tokens`."""
        return _trained_tokens(model, self.mask, self.tensors)

    @property
    def prompt_key(self) -> tuple[bytes, tuple[str, ...]]:
        """Equal for rows with the same prompt, embeddings included."""
        return self.prompt_ids.tobytes(), tuple(visual.source.key for visual in self.visual)


@dataclass(slots=True)
class Group:
    """The n samples of one prompt, which share the prompt's prefix cache and are compared by group estimators."""

    prompt: Prompt
    samples: list[Sample]
    baseline: Sample | None = None
    """The greedy response whose score is subtracted from those of the others (ReMax). It is generated and scored with
    them, but is neither trained on nor part of the samples' metrics."""

    @property
    def generated(self) -> list[Sample]:
        """All samples to generate and score, the baseline first."""
        return self.samples if self.baseline is None else [self.baseline, *self.samples]


TRAINING, VALIDATION = "training", "validation"
"""Scopes of seeds that do not depend on the step."""


def sample_seed(run_seed: int, scope: int | str, prompt_index: int, rollout_index: int) -> int:
    """Return the 31-bit seed of a sample, independent of where and when the sample is generated.

    `scope`: the step, or TRAINING or VALIDATION for the same seed in every step.
    """
    digest = hashlib.blake2b(f"{run_seed}/{scope}/{prompt_index}/{rollout_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def make_groups(
    prompts: Sequence[Prompt],
    n: int,
    run_seed: int,
    step: int,
    with_baseline: bool = False,
    scope: str | None = None,
) -> list[Group]:
    """Return a group of `n` seeded samples without responses for each prompt, in the order of `prompts`.

    `with_baseline`: and a greedy one, with rollout index `n`. `scope`: of seeds that do not depend on the step, see
    `sample_seed`.
    """

    def sample(prompt: Prompt, k: int) -> Sample:
        seed = sample_seed(run_seed, step if scope is None else scope, prompt.index, k)
        return Sample(prompt, step, k, seed, is_baseline=k == n)

    return [
        Group(prompt, [sample(prompt, k) for k in range(n)], sample(prompt, n) if with_baseline else None)
        for prompt in prompts
    ]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward (and backward) pass on one rank."""

    rows: tuple[Row, ...]
    weight: float = 1.0
    """0 for a filler, which keeps the number of collectives equal on all ranks and must not count."""
    degree: int = 1
    """Number of consecutive ranks that split its sequences; each of them receives all rows."""
