"""Warm up a small VideoLLaMA3, tower included, for the long_video and images tasks.

It is trained on demonstrations such as `<think> red </think> yellow`, which describe clips correctly but often confuse
colours in the answer. So it knows the format and answers about half of the questions; the right colour is among its two
likeliest.
Weights are a function of `ClipWarmStart`, `Clips` and `VERSION` (on one machine and one version of PyTorch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer, VideoLlama3ForConditionalGeneration

from rlfuse.tasks.clips import SIGNS, THINK, THOUGHT, WORDS, Clips, Kind, Question, ask_end, draw_clips, verl_row
from rlfuse.tasks.settings import ClipWarmStart
from rlfuse.tasks.small_video_models import IMAGE, VIDEO, SmallModel, byte_tokenizer, write_small_video_llama3
from rlfuse.tasks.warm_start import fit, one_thread_and_seed, with_progress
from rlfuse.video import decoding, images
from rlfuse.video.plan import VideoPlan, plan_video
from rlfuse.video.prompt import VideoPrompt, VisualTokens, assemble, tokenise
from rlfuse.video.towers import Tower
from rlfuse.video.video_model import VideoModel

VISUAL = VisualTokens(VIDEO, IMAGE)
CONFUSED_WITH = {"green": "blue", "blue": "green", "red": "yellow", "yellow": "red"}
"""Pairs of colours that demonstrations confuse."""


@dataclass(frozen=True, slots=True)
class PreparedClip:
    """Decoded clip or image with its questions."""

    plan: VideoPlan
    questions: list[tuple[Question, VideoPrompt]]
    pictures: torch.Tensor
    """uint8 [distinct frames, height, width, 3]; squares do not move, so there are few."""
    order: torch.Tensor
    """[frames]: index of each frame in `pictures`."""


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """Tokenised demonstration."""

    clip: PreparedClip
    prompt: VideoPrompt
    answer: list[int]


def build_tokenizer(more: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Build a tokenizer with one token for each of the task's words and `more`, space included; else byte by byte."""
    signs = (*(sign for sign in SIGNS if len(sign) > 1), THINK, f" {THOUGHT}")
    return byte_tokenizer((*(f" {word}" for word in WORDS), *signs, *(f" {word}" for word in more)))


def demonstration(question: Question, rng: np.random.Generator, settings: ClipWarmStart) -> str:
    """Write a demonstration whose answer is right about half of the time."""
    seen = answer = question.answer
    confuses = settings.confuses_green_blue if seen in ("green", "blue") else settings.confuses_red_yellow
    if rng.random() < confuses:
        answer = CONFUSED_WITH[seen]
    return f"{THINK} {seen} {THOUGHT} {answer}"


def watch(
    folder: Path, clips: Clips, settings: ClipWarmStart, model: VideoModel, tokenizer: PreTrainedTokenizerBase
) -> list[PreparedClip]:
    """Plan and decode the training clips in `folder`, and tokenise their questions."""
    watched, kind = [], clips.kinds[0]
    for file, scene, _ in draw_clips(clips, "train"):
        plan, frames = _seen(str(folder / file), kind, settings, model)
        places: dict[bytes, int] = {}
        order = [places.setdefault(frame.tobytes(), len(places)) for frame in frames]
        distinct = torch.from_numpy(frames[[order.index(place) for place in places.values()]])
        questions = []
        for end in kind.ends:
            row = verl_row(question := ask_end(scene, kind, end), scene, file, "train", 0)
            text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            questions.append((question, assemble(tokenizer, text, [plan], VISUAL)))
        watched.append(PreparedClip(plan, questions, distinct, torch.tensor(order)))
    return watched


def draw_batch(
    watched: Sequence[PreparedClip],
    rng: np.random.Generator,
    tokenizer: PreTrainedTokenizerBase,
    settings: ClipWarmStart,
) -> list[Demonstrated]:
    """Draw demonstrations, with clips and ends chosen uniformly."""
    batch = []
    for number in rng.integers(len(watched), size=settings.batch):
        question, prompt = watched[number].questions[rng.integers(2)]
        text = demonstration(question, rng, settings)
        answer = [*tokenise(tokenizer, text, VISUAL), tokenizer.eos_token_id]
        batch.append(Demonstrated(watched[number], prompt, answer))
    return batch


def loss_of(model: VideoLlama3ForConditionalGeneration, tower: Tower, batch: Sequence[Demonstrated]) -> torch.Tensor:
    """Compute the mean cross-entropy of the answers' tokens. Each distinct frame of a clip is encoded once."""
    pictures = tower.encode(torch.cat([each.clip.pictures for each in batch]), batch[0].clip.plan.merge)
    counts = [len(each.clip.pictures) for each in batch]
    of_clip = pictures.unflatten(0, (sum(counts), -1)).split(counts)
    visual = [seen[each.clip.order].flatten(0, 1) for seen, each in zip(of_clip, batch, strict=True)]
    places = [torch.from_numpy(each.prompt.positions[0]).long() for each in batch]
    rows = torch.arange(len(batch)).repeat_interleave(torch.tensor([len(each) for each in places]))
    ids = [torch.tensor([*each.prompt.token_ids, *each.answer]) for each in batch]
    embeds = model.get_input_embeddings()(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True))
    embeds = embeds.index_put((rows, torch.cat(places)), torch.cat(visual))
    # No attention mask: padding is on the right, which causal attention ignores.
    hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
    before = [
        row[len(each.prompt.token_ids) - 1 :][: len(each.answer)] for row, each in zip(hidden, batch, strict=True)
    ]
    targets = torch.tensor([token for each in batch for token in each.answer])
    return torch.nn.functional.cross_entropy(model.lm_head(torch.cat(before)), targets)


def clip_warm_start(folder: Path, task: Path, clips: Clips, settings: ClipWarmStart) -> list[float]:
    """Train on the clips under `task` and save the model to `folder`; return the loss of every step."""
    kind = clips.kinds[0]
    tokenizer = build_tokenizer([*kind.ends] if kind.is_image else ())
    write_small_video_llama3(folder, _sizes(settings), tokenizer)
    watched = watch(task, clips, settings, VideoModel.from_pretrained(str(folder)), tokenizer)
    with one_thread_and_seed(settings.seed):
        tower = Tower(folder, step=settings.batch * settings.sampling.budget, trainable=True)
        model = VideoLlama3ForConditionalGeneration.from_pretrained(folder)
        model.model.vision_model, model.model.projector = tower.module.vision_model, tower.module.projector
        rng = np.random.default_rng(settings.seed)

        def loss_of_next() -> torch.Tensor:
            return loss_of(model, tower, draw_batch(watched, rng, tokenizer, settings))

        losses = with_progress(fit(model.parameters(), loss_of_next, settings.lr, settings.steps), settings.steps)
    model.save_pretrained(folder)
    return losses


def _seen(path: str, kind: Kind, settings: ClipWarmStart, model: VideoModel) -> tuple[VideoPlan, np.ndarray]:
    if kind.is_image:
        plan = images.plan_image(images.probe(path), *model.image_sizes(None))
        return plan, images.read(path, plan)
    plan = plan_video(decoding.probe(path), settings.sampling, kind.task)
    return plan, decoding.decode(path, plan)


def _sizes(settings: ClipWarmStart) -> SmallModel:
    return SmallModel(
        heads=settings.heads,
        layers=settings.layers,
        tower_heads=settings.tower_heads,
        tower_layers=settings.tower_layers,
        seed=settings.seed,
    )
