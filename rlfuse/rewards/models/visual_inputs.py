"""Build vLLM prompts with the clips and images of a row for a judge or classifier.

The model sees the frames and sizes of the row's plan. Embeddings of the policy's vision tower are reused if file, plan
and tower are the same. Markers in answers are treated as text.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from rlfuse.engines.vllm.offline_engine import OfflineEngine
from rlfuse.errors import RewardError, VideoError
from rlfuse.samples import Embedding, Visual

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from rlfuse.video.plan import Geometry
    from rlfuse.video.prompt import VideoPrompt
    from rlfuse.video.video_model import VideoModel

MAX_CACHED_BYTES = 1 << 30
BLOCK_BYTES = 64 << 20
MAX_VISUAL_TOKENS = 1 << 16
"""Visual tokens of samples that are scored in one batch; with 3,584 features, half a GB per copy."""


@dataclass(frozen=True, slots=True)
class InProcessEmbedding(Embedding):
    """Embedding whose rows are in the memory of this process."""

    rows: torch.Tensor | None = None

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        return self.rows[first:last]


class VisualInputs:
    """Clips and images as inputs of one model. Only `unsupported_reason` works before `start`."""

    def __init__(self, path: str, trust_remote_code: bool = False, *, key: str, otherwise: str):
        """Read the model's config. Raises RewardError if that fails.

        `key`: config key of the model. `otherwise`: remedy in messages about rows that the model does not support.
        """
        from rlfuse.video.video_model import VideoModel

        self._name, self._otherwise = f"{key}={path}", otherwise
        self._path = path
        try:
            self._model: VideoModel | None = VideoModel.from_pretrained(path, trust_remote_code)
        except VideoError:
            self._model = None
        except (OSError, ValueError) as error:
            raise RewardError(f"{self._name} can't be read: {error}") from error
        self._tower: Any = None
        self._embeddings: OrderedDict[str, InProcessEmbedding] = OrderedDict()

    def unsupported_reason(self, visual: Sequence[Visual]) -> str | None:
        return next((why for each in visual if (why := self._refusal(each))), None)

    def _refusal(self, visual: Visual) -> str | None:
        from rlfuse.video.models.base import Route, known_families
        from rlfuse.video.vllm_route import Refusal, select_route

        model, plan = self._model, visual.plan
        if model is None:
            families = known_families()
            return f"{self._name} can't process {visual.path}: use a model of {families}, or {self._otherwise}"
        geometry = self._image_geometry if plan.is_image else model.geometry
        if geometry != plan.geometry:
            return (
                f"{self._name} can't process {visual.path}: it expects frames of {geometry}, but they were planned for "
                f"the policy as {plan.geometry}. Use a model of the policy's family, or {self._otherwise}"
            )
        if model.family.route is Route.VIDEO_EMBEDS:
            route = select_route(self._config, plan)
            return f"{self._name} can't process {visual.path}: {route.reason}" if isinstance(route, Refusal) else None
        return None

    @cached_property
    def _config(self) -> PreTrainedConfig:
        """Model config, cached because `unsupported_reason` is called for every row of a data set."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._model.folder)

    @cached_property
    def _image_geometry(self) -> Geometry:
        return self._model.image_sizes(None)[1]

    @contextmanager
    def model_folder(self, read_head: Callable[[str], torch.nn.Linear] | None = None) -> Iterator[str]:
        """Yield the folder that vLLM loads: the model of a text model, else a temporary folder with the text part."""
        if self._model is None:
            yield self._path
        else:
            with TemporaryDirectory(prefix="rlfuse-text-part-") as folder:
                head = read_head(self._model.folder) if read_head else None
                yield self._model.servable_folder(Path(folder) / "model", head)

    def start(self, engine: OfflineEngine) -> None:
        self._tokenizer, self._dtype, self._prompts = engine.tokenizer, engine.dtype, engine.prompts

    def assemble(self, text: str, visual: Sequence[Visual], special: bool) -> VideoPrompt:
        """Return the prompt tokens, including visual ones. Raises VideoError if markers do not match `visual`.

        `special`: add special tokens as the tokenizer does, for text without a chat template.
        """
        from rlfuse.data.templates import with_bos
        from rlfuse.video.prompt import VideoPrompt

        if self._model is None:
            ids = self._tokenizer(text, add_special_tokens=special).input_ids
            return VideoPrompt(np.asarray(ids, np.int32), ())
        text = with_bos(text, self._tokenizer) if special else text
        return self._model.prompt(self._tokenizer, text, [each.plan for each in visual])

    def escape_markers(self, text: str) -> str:
        """Escape markers in the text, so that `assemble` treats them as text."""
        from rlfuse.video.prompt import escape_markers

        return escape_markers(text) if self._model else text

    def prompt(self, made: VideoPrompt, visual: Sequence[Visual]) -> dict[str, Any]:
        pairs = zip(visual, made.positions, strict=True)
        shown = [replace(each, positions=places, source=self._embedding(each)) for each, places in pairs]
        shown.sort(key=lambda each: each.positions[0])
        self._prompts.check("of a reward", made.token_ids, shown)
        return self._prompts.prompt(made.token_ids, shown)

    def _embedding(self, visual: Visual) -> Embedding:
        from rlfuse.video.embedding import content_hash, embedding_key
        from rlfuse.video.towers import Tower

        if self._tower is None:
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._tower = Tower(self._model.folder, device, self._dtype)
        key, given = embedding_key(content_hash(visual.path), visual.plan, self._tower.version), visual.source
        if given is not None and given.key == key and any(map(os.path.exists, (given.path, *given.copies))):
            return given
        if key not in self._embeddings:
            rows = self._encode(visual)
            self._embeddings[key] = InProcessEmbedding(key, "", *rows.shape, rows=rows)
            while (
                sum(each.rows.nbytes for each in self._embeddings.values()) > MAX_CACHED_BYTES
                and len(self._embeddings) > 1
            ):
                self._embeddings.popitem(last=False)
        self._embeddings.move_to_end(key)
        return self._embeddings[key]

    def _encode(self, visual: Visual) -> torch.Tensor:
        import torch

        from rlfuse.video.decode_pool import DecodePool

        plan, parts = visual.plan, []
        with DecodePool() as pool:
            for first, last in self._tower.shape.blocks(plan, 0, len(plan.times), BLOCK_BYTES):
                frames = torch.from_numpy(pool.decode(visual.path, plan, first, last))
                parts.append(self._tower.rows(frames, plan, first).to("cpu", torch.bfloat16))
        return torch.cat(parts)


def split_by_visual_tokens(samples: Sequence[Any]) -> Iterator[list[Any]]:
    """Split samples into batches of about MAX_VISUAL_TOKENS, which limits the memory for embeddings."""
    tokens = accumulate(sum(each.plan.tokens for each in sample.visual) for sample in samples)
    for _, few in groupby(zip(tokens, samples, strict=True), key=lambda pair: pair[0] // MAX_VISUAL_TOKENS):
        yield [sample for _, sample in few]
