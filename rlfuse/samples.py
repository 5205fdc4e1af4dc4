"""What moves through a run: prompts become groups of samples, samples gain a response, a reward and per-token tensors.

Role: the nouns that every other module shares. Plain data: no Ray, vLLM or torch import.
Invariants:
- a sample's identity is (step, prompt index, sibling) and its seed derives from them and the run's seed, so *where*
  and *when* it is generated never changes *what* is sampled;
- every per-token array of a sample has one entry for each response token, 0 where it is not trainable;
- a response carries the version of the weights that wrote it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlfuse.errors import EngineError

if TYPE_CHECKING:
    import torch


class FramePlan(Protocol):
    """What encoding asks of a `FramePlan`."""

    times: Sequence[float]
    """Seconds, one per frame shown."""
    height: int
    width: int
    temporal_patch: int
    merge: int
    tokens: int
    """Visual tokens of the whole clip."""
    kept: bytes | None
    """A byte for each token that the tower makes of the frames, 1 for those that are visual tokens; None: all are."""
    hash: str
    """Equal for plans that show the same frames in the same size."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Handle of a cached clip: bf16 [tokens, hidden] at `path` in a node's shared memory. Of towers that feed layers of
    the text model besides its input, `hidden` is of all of them together."""

    key: str
    path: str
    tokens: int
    hidden: int
    copies: tuple[str, ...] = ()
    """Paths of the same rows in the shared memory of other nodes."""

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows `first` to `last` (exclusive), mapped and not copied; what a reader writes to them stays with it.

        The file that is on the reader's node is mapped. EngineError if there is none.
        """
        import torch

        here = next(filter(os.path.exists, (self.path, *self.copies)), self.path)
        try:
            flat = torch.from_file(here, shared=False, size=self.tokens * self.hidden, dtype=torch.bfloat16)
        except RuntimeError as error:
            raise EngineError(
                f"embedding {self.key} is not at {here}: it was dropped, or lies on another node. Hold it (the "
                "step's name in `encode`) for as long as it is read."
            ) from error
        return flat.view(self.tokens, self.hidden)[first:last]


@dataclass(frozen=True, slots=True)
class Visual:
    """A clip of a prompt: its plan, and where its embedding stands. Travels as a handle, not as numbers."""

    positions: np.ndarray
    """int32 [v], ascending: places of the prompt that hold placeholders, one for each row of the embedding."""
    source: Embedding | None = None
    """Handle of bf16 [v, hidden] in every node's shared memory, mapped, so that what is not looked at is not loaded;
    None until it is encoded."""
    path: str = ""
    """Of its file; with the plan, for whoever encodes it again."""
    plan: FramePlan | None = None
    """The only source of the frames and of their count of tokens, for engine and trainer alike, and of M-RoPE's
    positions."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of data after tokenisation."""

    index: int
    """Row number in the loaded data set; stable for a given list of files."""
    token_ids: np.ndarray
    """int32 [prompt tokens], chat template applied."""
    text: str
    """The templated prompt as text."""
    messages: tuple[dict[str, Any], ...]
    """Chat messages as the row gave them (a plain string becomes one user message)."""
    data_source: str
    ground_truth: Any
    columns: dict[str, Any] = field(default_factory=dict)
    """Every column of the row, handed to reward functions by name (`extra_info`, `answer`, ...)."""
    visual: tuple[Visual, ...] = ()
    """Its clips, in order."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a rollout engine returns for one sample."""

    token_ids: np.ndarray
    """int32 [T]; includes the end-of-sequence token when the model wrote one."""
    log_probs: np.ndarray
    """float32 [T], of the sampled tokens under the engine's weights at the sampling temperature."""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    text: str
    """Decoded without special tokens."""
    trainable: np.ndarray | None = None
    """bool [T]: tokens that the model wrote. Others, for example a tool's output, are context: they have no log-prob
    (0 in every per-token array), no gradient, and no part in lengths and entropy. None: all are trainable."""

    def __post_init__(self) -> None:
        mask, tokens = self.trainable, len(self.token_ids)
        if mask is not None and (mask.dtype != bool or mask.shape != (tokens,) or not mask.any()):
            raise ValueError(
                f"Response.trainable: {mask.dtype} {list(mask.shape)} with {int(mask.sum())} of {tokens} tokens; it is "
                "bool, of one entry per token, and at least one token is trainable"
            )

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: `trainable`."""
        return _mask(self.token_ids, self.trainable)

    @property
    def length(self) -> int:
        """Trainable tokens."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Partial:
    """What a sample has when it leaves an engine unfinished: enough for another engine to go on as if it had stayed."""

    token_ids: np.ndarray
    """int32 [t], possibly none."""
    log_probs: np.ndarray
    """float32 [t]."""
    weight_version: int
    """Of the weights that drew the first token."""
    kv_key: str | None = None
    """Where its KV cache lies, when it travels too."""
    trainable: np.ndarray | None = None
    """bool [t], as of its `Response`."""

    def extended(self, token_ids: np.ndarray, log_probs: np.ndarray, version: int) -> Partial:
        """With tokens drawn after these; `version`: of the weights that drew the first of them."""
        before = self.trainable
        return Partial(
            np.concatenate([self.token_ids, token_ids]),
            np.concatenate([self.log_probs, log_probs]),
            self.weight_version if len(self.token_ids) else version,
            trainable=None if before is None else np.concatenate([before, np.ones(len(token_ids), dtype=bool)]),
        )


@dataclass(frozen=True, slots=True)
class Reward:
    """A sample's reward: the value that is trained on and the named parts it was made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """What is logged: each function's number as it came, and whatever else it gave."""
    text: str | None = None
    """Optional note for the log, for instance why a value is zero."""
    dimensions: dict[str, float] = field(default_factory=dict)
    """Function -> what its weight multiplies: its number, clipped; 0 where a gate closed. Filled in by `compose`."""
    gate: str | None = None
    """The gate that closed, so that nothing else was asked."""

    @property
    def accuracies(self) -> list[str]:
        """Names of the parts that are an `acc`, one for each function that returns one."""
        return [name for name in self.parts if name.rsplit("/", 1)[-1] == "acc"]

    @property
    def accuracy(self) -> float | None:
        """Mean of its `acc` parts; None if it has none."""
        names = self.accuracies
        return sum(self.parts[name] for name in names) / len(names) if names else None


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A reward function raised, timed out or lost its process. Never becomes a number."""

    function: str
    message: str
    """One line: the exception or what was waited for."""
    traceback: str = ""


PASSES = {"old_log_prob": ("actor", "old_log_probs"), "ref": ("ref", "ref_log_probs"), "values": ("critic", "values")}
"""Kind of scoring -> the model whose forward pass it is, and the tensor that it adds to a sample."""


@dataclass(slots=True)
class Sample:
    """One response to one prompt, from its seed to its advantages."""

    prompt: Prompt
    step: int
    rollout_index: int
    seed: int
    response: Response | None = None
    reward: Reward | RewardFailure | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [T] each: `old_log_probs`, `ref_log_probs`, `values`, `token_rewards`, `advantages`, `returns`."""

    @property
    def id(self) -> str:
        return f"{self.step}/{self.prompt.index}/{self.rollout_index}"

    @property
    def finished(self) -> Response:
        """The response; ValueError while there is none."""
        if self.response is None:
            raise ValueError(f"sample {self.id} has no response yet")
        return self.response

    @property
    def tokens(self) -> int:
        """Prompt plus response tokens, 0 response tokens while unfinished."""
        return len(self.prompt.token_ids) + (len(self.response.token_ids) if self.response else 0)

    def row(self, *names: str) -> Row:
        """The part that a trainer rank needs, with the named per-token arrays."""
        tensors, visual = {name: self.tensors[name] for name in names}, self.prompt.visual
        if bare := next((each for each in visual if each.source is None), None):
            raise ValueError(f"sample {self.id}: {bare.path} is not encoded; encode it before any pass.")
        response = self.finished
        return Row(self.prompt.token_ids, response.token_ids, tensors, self.id, visual, response.trainable)


def _mask(token_ids: np.ndarray, trainable: np.ndarray | None) -> np.ndarray:
    return np.ones(len(token_ids), dtype=bool) if trainable is None else trainable


def padded(
    arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray], dtype: np.typing.DTypeLike = np.float32
) -> np.ndarray:
    """[B, T] of one [T of the row] per row, 0 where a mask is False."""
    matrix = np.zeros((len(masks), max(map(len, masks))), dtype)
    for row, array, mask in zip(matrix, arrays, masks, strict=True):
        row[: len(mask)][mask] = array[mask]
    return matrix


def flattened(arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """The values where masks are True, row after row."""
    return np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)])


def per_row(flat: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float32 [T of the row] per row, of one value for each True of the masks in order; 0 where a mask is False."""
    rows, start = [], 0
    for mask in masks:
        row = np.zeros(len(mask), np.float32)
        end = start + int(mask.sum())
        row[mask], start = flat[start:end], end
        rows.append(row)
    return rows


def prompt_id(sample_id: str) -> str:
    """What the ids of samples of one prompt have in common, within a step."""
    return sample_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence as trainer ranks see it: prompt, response, and per-token arrays of the response."""

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    id: str = ""
    visual: tuple[Visual, ...] = ()
    trainable: np.ndarray | None = None
    """As of its `Response`."""

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: `trainable`."""
        return _mask(self.response_ids, self.trainable)

    @property
    def length(self) -> int:
        """Trainable tokens."""
        return int(self.mask.sum())

    @property
    def prompt_key(self) -> tuple[bytes, tuple[str, ...]]:
        """Rows with the same key have the same prompt, embeddings included."""
        return self.prompt_ids.tobytes(), tuple(visual.source.key for visual in self.visual)


@dataclass(slots=True)
class Group:
    """The n samples of one prompt: generated on one engine (they share its prefix), compared by group estimators."""

    prompt: Prompt
    samples: list[Sample]


def sample_seed(run_seed: int, step: int, prompt_index: int, rollout_index: int) -> int:
    """A 31-bit seed owned by the sample: the same wherever and whenever the sample is generated."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt_index}/{rollout_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def make_groups(prompts: Sequence[Prompt], n: int, run_seed: int, step: int) -> list[Group]:
    """`n` seeded, unfinished samples for each prompt, in the order of `prompts`."""
    return [
        Group(prompt, [Sample(prompt, step, k, sample_seed(run_seed, step, prompt.index, k)) for k in range(n)])
        for prompt in prompts
    ]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward (and backward) pass on one rank."""

    rows: tuple[Row, ...]
    weight: float = 1.0
    """0 for a filler: collectives need equal counts on all ranks, so a rank may run tokens that must not count."""
    degree: int = 1
    """So many consecutive ranks hold slices of it; all of them get it."""
