"""A small video model that has learned, from imperfect demonstrations, to say what came first and last in a clip.

Role: the starting policy of `experiment=long_video`. A VideoLLaMA3 of two layers, its tower included, is trained by a
short supervised run on demonstrations such as `<think> red blue </think> blue`: the colours at the two ends of the
clip, then the one asked for. The writer often overlooks an event or answers with the wrong end. So the policy knows the
format and sees most clips right, but answers about half of the questions; the right colour is nearly always among its
likeliest two, and what reinforcement learning has to do is to prefer it.
Invariants:
- the model sees what it will see in a job: the files, decoded by the plan, in prompts that `assemble` wrote;
- the weights are a function of `ClipWarmStart`, `Clips` and `VERSION` (on one machine and one version of PyTorch);
- demonstrations are about training clips only.
Caller: `prepare`, which keeps the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer, VideoLlama3ForConditionalGeneration

from rlfuse.tasks.clips import ENDS, SIGNS, THINK, THOUGHT, WORDS, Clips, Scene, ask_order, draw_clips, verl_row
from rlfuse.tasks.settings import ClipWarmStart
from rlfuse.tasks.supervised import fit, one_thread_and_seed, shown
from rlfuse.video.checkpoints import IMAGE, VIDEO, SmallModel, byte_tokenizer, write_small_video_llama3
from rlfuse.video.decoding import decode, probe
from rlfuse.video.plan import VideoPlan, plan_video
from rlfuse.video.prompt import VideoPrompt, VisualTokens, assemble, tokenise
from rlfuse.video.towers import Tower

VISUAL = VisualTokens(VIDEO, (IMAGE,))


@dataclass(frozen=True, slots=True)
class Watched:
    """A training clip as the model sees it."""

    scene: Scene
    prompts: dict[str, VideoPrompt]
    """By the end that is asked for."""
    pictures: torch.Tensor
    """uint8 [distinct frames, height, width, 3]; squares stand still, so they are few."""
    shown: torch.Tensor
    """[frames]: which of the pictures each frame is."""


def build_tokenizer() -> Qwen2Tokenizer:
    """The task's words as one token each, with the space before them; all else byte by byte."""
    return byte_tokenizer(
        (*(f" {word}" for word in WORDS), *(sign for sign in SIGNS if len(sign) > 1), THINK, f" {THOUGHT}")
    )


def demonstration(scene: Scene, end: str, rng: np.random.Generator, settings: ClipWarmStart) -> str:
    """What this writer says came first and last, and the answer; right about half of the time."""
    seen = {name: scene.events[place].colour for name, place in ENDS.items()}
    if rng.random() < settings.overlooks:
        seen[end] = scene.events[1 if end == "first" else -2].colour
    [other] = ENDS.keys() - {end}
    answer = seen[other if rng.random() < settings.confuses else end]
    return f"{THINK} {' '.join(seen.values())} {THOUGHT} {answer}"


def watch(folder: Path, clips: Clips, settings: ClipWarmStart, tokenizer: PreTrainedTokenizerBase) -> list[Watched]:
    """The training clips in `folder`, planned, decoded and asked about."""
    watched = []
    for video, scene, _ in draw_clips(clips, "train"):
        path = str(folder / video)
        plan = plan_video(probe(path), settings.sampling, ask_order(scene, "first").kind.task)
        places: dict[bytes, int] = {}
        frames = torch.from_numpy(decode(path, plan))
        shown = torch.tensor([places.setdefault(frame.numpy().tobytes(), len(places)) for frame in frames])
        pictures = frames[[shown.tolist().index(place) for place in range(len(places))]]
        prompts = {end: _prompt(scene, end, video, plan, tokenizer) for end in ENDS}
        watched.append(Watched(scene, prompts, pictures, shown))
    return watched


def logits_of(
    model: VideoLlama3ForConditionalGeneration,
    tower: Tower,
    batch: Sequence[Watched],
    prompts: Sequence[VideoPrompt],
    answers: Sequence[Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """([answer tokens, vocabulary], the answers' ids one after the other): what the model expects at each of them."""
    rows = [torch.tensor([*prompt.token_ids, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    pictures = tower.encode(torch.cat([clip.pictures for clip in batch])).unflatten(
        0, (-1, tower_tokens(batch, prompts))
    )
    embeds, passed = model.get_input_embeddings()(ids), 0
    for row, (clip, prompt) in enumerate(zip(batch, prompts, strict=True)):
        [places] = prompt.positions
        frames = pictures[passed + clip.shown]
        embeds = embeds.index_put((torch.tensor(row), torch.from_numpy(places).long()), frames.flatten(0, 1))
        passed += len(clip.pictures)
    # No attention mask: padding is on the right, where causal attention never looks from an answer.
    hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
    before = [
        hidden[row, len(p.token_ids) - 1 :][: len(a)] for row, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    return model.lm_head(torch.cat(before)), torch.tensor([token for answer in answers for token in answer])


def tower_tokens(batch: Sequence[Watched], prompts: Sequence[VideoPrompt]) -> int:
    """Visual tokens of a frame."""
    return len(prompts[0].positions[0]) // len(batch[0].shown)


def clip_warm_start(folder: Path, task: Path, clips: Clips, settings: ClipWarmStart) -> list[float]:
    """Train on the clips under `task` and save the whole model into `folder`; returns the loss of every step."""
    tokenizer = build_tokenizer()
    write_small_video_llama3(folder, _sizes(settings), tokenizer)
    watched = watch(task, clips, settings, tokenizer)
    with one_thread_and_seed(settings.seed):
        tower = Tower(folder, step=settings.batch * settings.sampling.budget, trainable=True)
        model = VideoLlama3ForConditionalGeneration.from_pretrained(folder)
        model.model.vision_model, model.model.projector = tower.module.vision_model, tower.module.projector
        rng = np.random.default_rng(settings.seed)

        def loss_of_next() -> torch.Tensor:
            batch = [watched[number] for number in rng.integers(len(watched), size=settings.batch)]
            ends = rng.choice(list(ENDS), settings.batch).tolist()
            texts = [demonstration(clip.scene, end, rng, settings) for clip, end in zip(batch, ends, strict=True)]
            answers = [[*tokenise(tokenizer, text, VISUAL), tokenizer.eos_token_id] for text in texts]
            prompts = [clip.prompts[end] for clip, end in zip(batch, ends, strict=True)]
            return torch.nn.functional.cross_entropy(*logits_of(model, tower, batch, prompts, answers))

        losses = shown(fit(model.parameters(), loss_of_next, settings.lr, settings.steps), settings.steps)
    model.save_pretrained(folder)
    return losses


def _prompt(scene: Scene, end: str, video: str, plan: VideoPlan, tokenizer: PreTrainedTokenizerBase) -> VideoPrompt:
    messages = verl_row(ask_order(scene, end), scene, video, "train", 0)["prompt"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return assemble(tokenizer, text, [plan], VISUAL)


def _sizes(settings: ClipWarmStart) -> SmallModel:
    return SmallModel(
        heads=settings.heads,
        layers=settings.layers,
        tower_heads=settings.tower_heads,
        tower_layers=settings.tower_layers,
        seed=settings.seed,
    )
