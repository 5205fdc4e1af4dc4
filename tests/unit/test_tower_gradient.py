"""The gradient of a vision tower computed in parts equals the gradient of the complete clip."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlfuse.engines.trainer.offloading import to_device, to_host
from rlfuse.engines.trainer.vision_tower import TowerSettings, TrainedTower
from rlfuse.errors import EngineError, VideoError
from rlfuse.samples import Embedding, Row, Visual
from rlfuse.tasks.small_video_models import write_small_qwen3_vl, write_small_qwen25_vl, write_small_video_llama3
from rlfuse.video.embedding import content_hash, embedding_key, write_rows
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.towers import Tower

FRAMES = 11
SIZES = {write_small_video_llama3: (56, 84), write_small_qwen25_vl: (56, 84), write_small_qwen3_vl: (64, 96)}
"""(height, width) of a frame of six tokens."""
KEPT = bytes([1] * 6 + [0, 1, 1, 0, 1, 1] * (FRAMES - 2) + [1] * 6)
"""A mask of tokens that token compression may keep."""


@dataclass
class Pool:
    """A decoder that returns noise and records the requested frames."""

    pixels: np.ndarray
    requested: list[int] = field(default_factory=list)
    fails: bool = False

    def stream(self, clips):
        for clip in clips:
            self.requested += range(clip.first, clip.last)
            yield VideoError("broken", "Replace it", clip.path) if self.fails else self.pixels[clip.first : clip.last]


def kept_rows(rows, plan):
    """Return the rows of a clip that its plan keeps."""
    return rows if plan.kept is None else rows[[each == 1 for each in plan.kept]]


@pytest.fixture(params=[*((write, None) for write in SIZES), (write_small_video_llama3, KEPT)])
def clip(request, tmp_path):
    """Return a trained tower, its decoder, and a clip with its cached embedding."""
    write, kept = request.param
    folder, (height, width) = write(tmp_path / "model"), SIZES[write]
    pool = Pool(np.random.default_rng(0).integers(0, 256, (FRAMES, height, width, 3), np.uint8))
    settings = EncoderSettings(str(folder), step=2, block_bytes=5 * height * width * 3)
    trained = TrainedTower(TowerSettings(settings, pool), "cpu", reference=True)
    (tmp_path / "clip.mp4").write_bytes(b"a clip")
    path, plan = (
        str(tmp_path / "clip.mp4"),
        SimpleNamespace(times=range(FRAMES), height=height, width=width, merge=2, hash="p", kept=kept),
    )
    with torch.no_grad():
        rows = kept_rows(Tower(folder, step=2).encode(torch.from_numpy(pool.pixels)), plan)
    (tmp_path / "rows").write_bytes(bytes(2 * rows.numel()))
    write_rows(str(tmp_path / "rows"), 0, rows)
    key = embedding_key(content_hash(path), plan, trained.current.version)
    embedding = Embedding(key, str(tmp_path / "rows"), *rows.shape)
    return trained, pool, Visual(np.arange(len(rows)), embedding, path, plan)


def row_of(visual):
    return Row(np.zeros(80, np.int32), np.zeros(2, np.int32), visual=(visual,))


@pytest.mark.slow
def test_partial_gradients_sum_to_the_gradient_of_the_clip(clip):
    trained, pool, visual = clip
    count = visual.source.tokens
    rows, clips = trained.rows_with_gradient([row_of(visual), row_of(visual)])
    assert len(clips) == 1 and rows[0].prompt_key == row_of(visual).prompt_key
    weights = torch.randn(count, visual.source.hidden, generator=torch.Generator().manual_seed(0))
    parts = [(7, count - 5), (9, 20), (7, count - 5)]  # slices of several rows, one of them twice
    total = sum((row.visual[0].source.read(*part).sin() * weights[slice(*part)]).sum()
                for row, part in zip([*rows, rows[0]], parts, strict=True))  # fmt: skip
    for part in parts:
        assert torch.equal(rows[0].visual[0].source.read(*part).detach(), visual.source.read(*part).float())
    total.backward()
    trained.backward(clips)
    assert sorted(pool.requested) == list(range(FRAMES))  # each frame is decoded once
    features = kept_rows(trained.current.encode(torch.from_numpy(pool.pixels)), visual.plan)
    features = features + (features.bfloat16().float() - features).detach()
    expected = sum((features[slice(*part)].sin() * weights[slice(*part)]).sum() for part in parts)
    found = torch.autograd.grad(expected, list(trained.current.module.parameters()))
    for have, want in zip(trained.sums, found, strict=True):
        assert (have - want).norm() <= 1e-5 * want.norm()
    pool.requested.clear()
    rows, clips = trained.rows_with_gradient([row_of(visual)])
    rows[0].visual[0].source.read(8, 9).sum().backward()
    trained.backward(clips)
    assert len(pool.requested) <= 2 * trained.current.shape.cut  # only the frames of the slice


@pytest.mark.slow
def test_an_updated_tower_encodes_again_and_the_reference_uses_the_first_embedding(clip):
    trained, pool, visual = clip
    count, rows = visual.source.tokens, [row_of(visual)]
    with torch.no_grad():
        for weight in trained.current.module.parameters():
            weight.mul_(1.1)
    trained.updates = 1
    read = {model: trained.rows_of(model, rows)[0].visual[0].source.read(3, count) for model in ("critic", "ref")}
    assert pool.requested == []
    actor = trained.rows_of("actor", rows)[0].visual[0].source.read(3, count)
    graded = trained.rows_with_gradient(rows)[0][0].visual[0].source.read(3, count)
    with torch.no_grad():
        expected = kept_rows(trained.current.encode(torch.from_numpy(pool.pixels)), visual.plan).bfloat16().float()[3:]
    for name in read:
        assert torch.equal(read[name], visual.source.read(3, count))
    assert torch.equal(actor, expected) and torch.equal(graded.detach(), expected)
    # After the push, rows have new embeddings, and the reference encodes with the first tower.
    trained.embedded_at = 1
    with pytest.raises(EngineError, match=r"made by the tower after 0 updates, but rows need .* after 1 updates"):
        trained.rows_of("actor", rows)
    key = embedding_key(content_hash(visual.path), visual.plan, trained.current.version_after(1))
    new = replace(visual, source=replace(visual.source, key=key))
    assert torch.equal(trained.rows_of("ref", [row_of(new)])[0].visual[0].source.read(3, count), read["ref"].float())


@pytest.mark.slow
def test_an_offloaded_tower_is_saved_and_continues_unchanged(clip, tmp_path):
    trained, _, visual = clip
    for weight in trained.current.module.parameters():
        weight.data = weight.data.clone()  # as on a GPU, not a mapped file

    def learn():
        rows, clips = trained.rows_with_gradient([row_of(visual)])
        rows[0].visual[0].source.read(0, 9).sin().sum().backward()
        trained.backward(clips)

    learn()
    once = [total.clone() for total in trained.sums]
    trained.write(tmp_path / "resident.safetensors")
    for module in trained.modules:
        to_host(module)
    assert not any(total.untyped_storage().nbytes() for total in trained.sums)
    trained.write(tmp_path / "offloaded.safetensors")
    assert not any(weight.untyped_storage().nbytes() for weight in trained.current.module.parameters())
    for module in trained.modules:
        to_device(module)
    resident, offloaded = (load_file(tmp_path / f"{name}.safetensors") for name in ("resident", "offloaded"))
    assert resident.keys() == offloaded.keys() and all(
        torch.equal(resident[name], offloaded[name]) for name in resident
    )
    assert all(map(torch.equal, trained.sums, once))
    learn()
    assert all(torch.equal(total, 2 * first) for total, first in zip(trained.sums, once, strict=True))


def test_clips_that_cannot_be_trained_on_are_rejected(clip, tmp_path):
    trained, pool, visual = clip
    (tmp_path / "clip.mp4").write_bytes(b"another clip")
    with pytest.raises(EngineError, match="made from another file, plan or tower"):
        trained.rows_with_gradient([row_of(visual)])
    (tmp_path / "clip.mp4").write_bytes(b"a clip")
    rows, clips = trained.rows_with_gradient([row_of(visual)])
    rows[0].visual[0].source.read(0, 4).sum().backward()
    pool.fails = True
    with pytest.raises(EngineError, match=r"cannot be decoded again: .*clip\.mp4: broken"):
        trained.backward(clips)
