"""The gradient of a tower in parts, from what parts of a clip's embedding got, is that of the whole clip at once."""

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
"""Six tokens each."""
KEPT = bytes([1] * 6 + [0, 1, 1, 0, 1, 1] * (FRAMES - 2) + [1] * 6)
"""What token compression may leave of a clip."""


@dataclass
class Pool:
    """Decodes noise, and remembers which frames it was asked for."""

    pixels: np.ndarray
    asked: list[int] = field(default_factory=list)
    fails: bool = False

    def stream(self, clips):
        for clip in clips:
            self.asked += range(clip.first, clip.last)
            yield VideoError("broken", "Replace it", clip.path) if self.fails else self.pixels[clip.first : clip.last]


def as_kept(rows, plan):
    """The rows of a whole clip without those that its plan leaves out."""
    return rows if plan.kept is None else rows[[each == 1 for each in plan.kept]]


@pytest.fixture(params=[*((write, None) for write in SIZES), (write_small_video_llama3, KEPT)])
def shown(request, tmp_path):
    """A tower to be trained, its decoder, and a clip with its cached embedding."""
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
        rows = as_kept(Tower(folder, step=2).encode(torch.from_numpy(pool.pixels)), plan)
    (tmp_path / "rows").write_bytes(bytes(2 * rows.numel()))
    write_rows(str(tmp_path / "rows"), 0, rows)
    key = embedding_key(content_hash(path), plan, trained.current.version)
    embedding = Embedding(key, str(tmp_path / "rows"), *rows.shape)
    return trained, pool, Visual(np.arange(len(rows)), embedding, path, plan)


def row_of(visual):
    return Row(np.zeros(80, np.int32), np.zeros(2, np.int32), visual=(visual,))


@pytest.mark.slow
def test_parts_give_the_gradient_of_the_whole(shown):
    trained, pool, visual = shown
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
    assert sorted(pool.asked) == list(range(FRAMES))  # once, whoever shows it
    features = as_kept(trained.current.encode(torch.from_numpy(pool.pixels)), visual.plan)
    features = features + (features.bfloat16().float() - features).detach()
    expected = sum((features[slice(*part)].sin() * weights[slice(*part)]).sum() for part in parts)
    found = torch.autograd.grad(expected, list(trained.current.module.parameters()))
    for have, want in zip(trained.sums, found, strict=True):
        assert (have - want).norm() <= 1e-5 * want.norm()
    pool.asked.clear()
    rows, clips = trained.rows_with_gradient([row_of(visual)])
    rows[0].visual[0].source.read(8, 9).sum().backward()
    trained.backward(clips)
    assert len(pool.asked) <= 2 * trained.current.shape.cut  # only what a slice needs


@pytest.mark.slow
def test_a_tower_that_learned_encodes_anew_and_the_reference_sees_the_first(shown):
    trained, pool, visual = shown
    count, rows = visual.source.tokens, [row_of(visual)]
    with torch.no_grad():
        for weight in trained.current.module.parameters():
            weight.mul_(1.1)
    trained.updates = 1
    read = {model: trained.rows_of(model, rows)[0].visual[0].source.read(3, count) for model in ("critic", "ref")}
    assert pool.asked == []
    actor = trained.rows_of("actor", rows)[0].visual[0].source.read(3, count)
    graded = trained.rows_with_gradient(rows)[0][0].visual[0].source.read(3, count)
    with torch.no_grad():
        expected = as_kept(trained.current.encode(torch.from_numpy(pool.pixels)), visual.plan).bfloat16().float()[3:]
    for name in read:
        assert torch.equal(read[name], visual.source.read(3, count))
    assert torch.equal(actor, expected) and torch.equal(graded.detach(), expected)
    # Handed over: rows bring what it encoded, and the reference goes back to the first.
    trained.embedded_at = 1
    with pytest.raises(EngineError, match=r"made by the tower after 0 updates, but rows need .* after 1 updates"):
        trained.rows_of("actor", rows)
    key = embedding_key(content_hash(visual.path), visual.plan, trained.current.version_after(1))
    new = replace(visual, source=replace(visual.source, key=key))
    assert torch.equal(trained.rows_of("ref", [row_of(new)])[0].visual[0].source.read(3, count), read["ref"].float())


@pytest.mark.slow
def test_a_tower_that_is_away_is_written_and_goes_on_as_if_it_had_stayed(shown, tmp_path):
    trained, _, visual = shown
    for weight in trained.current.module.parameters():
        weight.data = weight.data.clone()  # on a GPU they are not a mapped file

    def learn():
        rows, clips = trained.rows_with_gradient([row_of(visual)])
        rows[0].visual[0].source.read(0, 9).sin().sum().backward()
        trained.backward(clips)

    learn()
    once = [total.clone() for total in trained.sums]
    trained.write(tmp_path / "there.safetensors")
    for module in trained.modules:
        to_host(module)
    assert not any(total.untyped_storage().nbytes() for total in trained.sums)
    trained.write(tmp_path / "away.safetensors")
    assert not any(weight.untyped_storage().nbytes() for weight in trained.current.module.parameters())
    for module in trained.modules:
        to_device(module)
    there, away = (load_file(tmp_path / f"{name}.safetensors") for name in ("there", "away"))
    assert there.keys() == away.keys() and all(torch.equal(there[name], away[name]) for name in there)
    assert all(map(torch.equal, trained.sums, once))
    learn()
    assert all(torch.equal(total, 2 * first) for total, first in zip(trained.sums, once, strict=True))


def test_what_can_not_be_trained_on_is_refused(shown, tmp_path):
    trained, pool, visual = shown
    (tmp_path / "clip.mp4").write_bytes(b"another clip")
    with pytest.raises(EngineError, match="made from another file, plan or tower"):
        trained.rows_with_gradient([row_of(visual)])
    (tmp_path / "clip.mp4").write_bytes(b"a clip")
    rows, clips = trained.rows_with_gradient([row_of(visual)])
    rows[0].visual[0].source.read(0, 4).sum().backward()
    pool.fails = True
    with pytest.raises(EngineError, match=r"cannot be decoded again: .*clip\.mp4: broken"):
        trained.backward(clips)
