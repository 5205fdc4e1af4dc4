"""Encoding on real encoder ranks: bitwise equal to the unsharded tower, each clip once, isolated failures, two caches.

Three ranks on two simulated nodes of one machine: two ranks share a cache and the third has another, so that a clip may
be encoded on both. A clip's file selects what happens to its frames, which are noise seeded by its text.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import save_file

from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.errors import EngineError
from rlfuse.observe.journal import count_faults
from rlfuse.samples import Embedding, Prompt, Visual, make_groups
from rlfuse.tasks.small_video_models import SmallModel, write_small_video_llama3
from rlfuse.video.cache import CacheSettings
from rlfuse.video.encoder_handle import EncoderPlacement
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.encoding import Clip, ClipFailure, SequenceParallelEncoder
from rlfuse.video.step_clips import StepClips
from rlfuse.video.towers import Tower

TEXT_HIDDEN = 128
BLOCK = 3 * 56 * 84 * 3
"""Bytes of three frames."""
LIMIT = 1 << 20


def frame_reader():
    """Return the decoder of these tests, defined inside a function so that it is pickled by value."""

    def frames(path, plan, first, last):
        import os
        import zlib

        import numpy as np

        with open(path) as file:
            text = file.read()
        if text.startswith("die"):
            os._exit(9)
        if text.startswith("broken"):
            raise RuntimeError("moov atom not found")
        shape = (len(plan.times), plan.height, plan.width, 3)
        noise = np.random.default_rng(zlib.crc32(text.encode())).integers(0, 256, shape, np.uint8)
        return noise[first : last - text.startswith("short")]

    return frames


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_video_llama3(tmp_path_factory.mktemp("models") / "video_llama3")


@pytest.fixture(scope="module")
async def encoder(ray_cluster, model):
    environment = worker_environment("cpu")
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    places = [EncoderPlacement(options, "left"), EncoderPlacement(options, "left"), EncoderPlacement(options, "right")]
    settings = EncoderSettings(str(model), block_bytes=BLOCK, prefetch_bytes=2 * BLOCK)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        cache = CacheSettings(LIMIT, root=memory)
        encoder = SequenceParallelEncoder(settings, cache, frame_reader(), places, 120.0, environment)
        await encoder.start()
        yield encoder
        assert len(os.listdir(memory)) == 2
        await encoder.close()
        assert os.listdir(memory) == []


@pytest.fixture
def clip(tmp_path):
    def make(name, frames, height=56, width=84, fps=1.0, text=None, kept=None):
        path = tmp_path / f"{name}.mp4"
        path.write_text(text or f"{name} of {tmp_path}")
        times = tuple(i / fps for i in range(frames))
        seen = hashlib.sha256(repr((times, height, width, kept)).encode()).hexdigest()
        tokens = kept.count(1) if kept else frames * height * width // 28**2
        plan = SimpleNamespace(
            times=times, height=height, width=width, temporal_patch=1, merge=2, tokens=tokens, hash=seen,
            frames=frames, level=6, is_image=False, kept=kept,
        )  # fmt: skip
        return Clip(name, str(path), plan)

    return make


def unsharded(tower, clip) -> torch.Tensor:
    """Return the clip's embeddings by one process."""
    frames = frame_reader()(clip.path, clip.plan, 0, len(clip.plan.times))
    rows = tower.encode(torch.from_numpy(frames)).bfloat16()
    return rows if clip.plan.kept is None else rows[[token == 1 for token in clip.plan.kept]]


async def test_a_mixed_batch_is_bitwise_the_unsharded_tower_and_encoded_once(encoder, model, clip):
    clips = [
        clip("long", 23),
        clip("tall", 5, 112, 28, fps=2),
        clip("image", 1, 28, 28),
        clip("wide", 8, 28, 140, fps=5),
        clip("compressed", 19, kept=bytes([1] * 6 + [0, 1, 0, 0, 1, 1] * 17 + [1] + [0] * 5)),
    ]
    again = clip("the long one again", 23, text=Path(clips[0].path).read_text())
    await encoder.metrics()
    handles = await encoder.encode([*clips, again], "step 1")
    tower = Tower(model)
    for handle, one in zip(handles, clips, strict=False):
        assert (handle.tokens, handle.hidden) == (one.plan.tokens, TEXT_HIDDEN)
        assert torch.equal(handle.read(), unsharded(tower, one))
    assert handles[-1] == handles[0]
    metrics = await encoder.metrics()
    assert metrics["video/encoded_over_unique_tokens"] == 1.0
    assert metrics["video/encoded_tokens"] == sum(one.plan.tokens for one in clips)
    assert (metrics["video/cache_misses"], metrics["video/cache_hits"]) == (5, 0)
    whole = sum(one.plan.tokens for one in clips) * TEXT_HIDDEN * 2
    assert metrics["video/cache_bytes"] == 2 * whole, "a node lacks embeddings"
    assert metrics["video/shard_imbalance"] < 1.2
    spans = await encoder.drain()
    assert {span.where for span in spans} == {"encoder/0", "encoder/1", "encoder/2"}
    assert sum(span.tokens for span in spans) == metrics["video/encoded_tokens"]
    # A second request is served from the cache.
    assert await encoder.encode(clips, "step 2") == handles[:-1]
    metrics = await encoder.metrics()
    assert (metrics["video/encoded_tokens"], metrics["video/cache_hits"]) == (0, 5)
    assert await encoder.drain() == []


async def test_a_clip_encoded_on_two_nodes_is_complete_on_both_and_transferred_once(encoder, model, clip):
    one = clip("shared", 9)
    before = (await encoder.metrics())["video/cache_received_bytes"]
    (handle,) = await encoder.encode([one], "sharing")
    spans = await encoder.drain()
    assert sorted((span.where, span.tokens) for span in spans) == [(f"encoder/{i}", 3 * 6) for i in range(3)]
    whole = unsharded(Tower(model), one)
    paths = [Path(handle.path), *map(Path, handle.copies)]
    assert len({path.parent for path in paths}) == 2
    part, rest = (
        3 * 6 * TEXT_HIDDEN * 2,
        9 * 6 * TEXT_HIDDEN * 2,
    )  # to the home node the parts encoded elsewhere, from it the whole
    assert (await encoder.metrics())["video/cache_received_bytes"] - before == part + rest
    for path in paths:
        assert torch.equal(replace(handle, path=str(path), copies=()).read(), whole)
        # The part encoded on the other node is removed there.
        assert [file.name for file in path.parent.glob(f"{handle.key}*")] == [f"{handle.key}.bf16"]
    there = replace(handle, path="/another/host", copies=("/a/third", str(paths[1])))
    assert torch.equal(there.read(), whole), "a reader does not map the file on its node"
    assert await encoder.encode([one], "sharing") == [handle]
    assert await encoder.drain() == []
    assert (await encoder.metrics())["video/cache_received_bytes"] - before == part + rest


async def test_embeddings_lost_on_a_node_are_copied_instead_of_encoded_again(encoder, model, clip):
    one = clip("lost", 4)
    (handle,) = await encoder.encode([one], "first")
    await encoder.release("first")
    await encoder.drain()
    await encoder.store.abandon("right", handle.key)
    assert await encoder.encode([one], "second") == [handle]
    assert await encoder.drain() == []
    assert torch.equal(replace(handle, path=handle.copies[0], copies=()).read(), unsharded(Tower(model), one))


async def test_more_ranks_than_frames(encoder, model, clip):
    one = clip("pair", 2)
    (handle,) = await encoder.encode([one], "pair")
    assert torch.equal(handle.read(), unsharded(Tower(model), one))
    assert len(await encoder.drain()) == 2


async def test_failed_clips_are_named_and_the_others_are_encoded(encoder, model, clip):
    texts = {name: f"{name} {clip}" for name in ("broken", "die", "short")}
    bad = {name: clip(name, 1 if name == "die" else 6, text=text) for name, text in texts.items()}  # kills one rank
    missing = clip("missing", 3)
    Path(missing.path).unlink()
    unfit = clip("unfit", 3)
    unfit.plan.tokens += 1
    good = [clip(f"good {i}", 4) for i in range(3)]
    batch = [good[0], bad["broken"], good[1], bad["die"], missing, bad["short"], unfit, good[2]]
    results = await encoder.encode(batch, "failures")
    outcomes = dict(zip((one.id for one in batch), results, strict=True))
    tower = Tower(model)
    for one in good:
        assert torch.equal(outcomes.pop(one.id).read(), unsharded(tower, one))
    assert all(isinstance(outcome, ClipFailure) for outcome in outcomes.values())
    for name, message in {
        "broken": "moov atom not found",
        "die": "encoder/. died during the call to encode frames",
        "missing": "No such file",
        "short": r"instead of uint8 \[\d, 56, 84, 3\]",
        "unfit": "the plan expects 19 tokens .* the tower gives 18",
    }.items():
        assert re.search(message, outcomes[name].message) and f"{name} (" in outcomes[name].message
    metrics = await encoder.metrics()
    assert (metrics["video/failed_clips"], metrics["video/encoded_over_unique_tokens"]) == (5, 1.0)
    assert count_faults(await encoder.drain())["encoder_ranks_replaced"] >= 1, "the clip whose rank died"
    ray.kill(encoder.ranks[0]._actor)  # while the rank is idle
    while not (faults := count_faults(await encoder.drain())):
        await asyncio.sleep(0.1)
    assert faults == {"encoder_ranks_replaced": 1}
    # All ranks are restored, and failed clips have left no files.
    assert all(isinstance(one, Embedding) for one in await encoder.encode([clip("after", 6)], "failures"))
    assert not list(Path((await encoder.encode(good[:1], "failures"))[0].path).parent.glob("*.partial"))


async def drained(encoder, count):
    """Wait for `count` spans, which ranks record asynchronously."""
    spans = await encoder.drain()
    for _ in range(600):
        if len(spans) >= count:
            return spans
        await asyncio.sleep(0.1)
        spans += await encoder.drain()
    raise AssertionError(f"{len(spans)} of {count} spans were recorded within 60 s")


async def test_prefetched_frames_stay_within_the_memory_limit_and_match_the_file(encoder, model, clip):
    tower = Tower(model)
    early = clip("early", 23)
    await encoder.drain()
    await encoder.metrics()
    await encoder.prefetch([early])
    spans = await drained(encoder, 6)
    assert {span.kind for span in spans} == {"prefetch"}
    held = {where: sum(s.attributes["bytes"] for s in spans if s.where == where) for where in encoder_names(3)}
    assert set(held.values()) == {2 * BLOCK}, "each rank prefetches as many of its 8 or 7 frames as fit"
    (handle,) = await encoder.encode([early], "early")
    assert torch.equal(handle.read(), unsharded(tower, early))
    assert (await encoder.metrics())["video/prefetched_frames"] == 3 * 6
    await encoder.prefetch([early])  # no-op for an encoded clip
    assert {span.kind for span in await encoder.drain()} == {"encode"}

    changed, other = clip("changed", 6), clip("other", 6)
    await encoder.prefetch([changed])
    await drained(encoder, 3)
    Path(changed.path).write_text("has other frames now")
    for handle, one in zip(await encoder.encode([changed, other], "early"), (changed, other), strict=True):
        assert torch.equal(handle.read(), unsharded(tower, one))
    assert (await encoder.metrics())["video/prefetched_frames"] == 0


async def test_a_rank_that_dies_during_prefetch_fails_no_other_clip(encoder, model, clip):
    await encoder.prefetch([clip("die early", 1, text="die early")])
    one = clip("survivor", 4)
    (handle,) = await encoder.encode([one], "early")
    assert torch.equal(handle.read(), unsharded(Tower(model), one))
    await encoder.drain()
    await encoder.release("early")


def encoder_names(count):
    return [f"encoder/{rank}" for rank in range(count)]


async def test_encode_ahead_uses_the_fewest_ranks_that_finish_in_time(encoder, model, clip):
    for holder in ("step 1", "step 2", "sharing", "second", "pair", "failures"):
        await encoder.release(holder)
    measured, one, other = (clip(name, 9) for name in ("measured", "ahead", "called off"))
    halves = [clip(f"half ahead {i}", 1, 28 * 40, 28 * 40) for i in range(3)]  # 1600 tokens, 400 KiB
    await encoder.encode([measured], "now")
    await encoder.metrics()
    await encoder.drain()
    await encoder.encode_ahead([measured, one], "ahead", 1e6, lambda: False)
    await encoder.encode_ahead([other], "ahead", 1e6, lambda: True)
    assert {(span.where, span.tokens) for span in await encoder.drain()} == {("encoder/0", one.plan.tokens)}
    metrics = await encoder.metrics()
    assert (
        metrics["video/encode_ahead_ranks"],
        metrics["video/encoded_ahead_tokens"],
        metrics["video/cache_misses"],
    ) == (
        1,
        9 * 6,
        0,
    )
    (handle,) = await encoder.encode([one], "now")
    assert torch.equal(handle.read(), unsharded(Tower(model), one)) and await encoder.drain() == []

    with pytest.raises(EngineError, match=r"held by ahead, now\)"):
        await encoder.encode_ahead(halves, "ahead", 1e6, lambda: False)
    assert (await encoder.metrics())["video/encoded_ahead_tokens"] == 2 * 1600
    await encoder.release("ahead")
    assert all(isinstance(one, Embedding) for one in await encoder.encode(halves[1:], "now"))
    assert (await encoder.metrics())["video/encoded_tokens"] == 1600, "the third clip did not fit before"
    await encoder.release("now")


async def test_clips_of_the_next_step_are_encoded_during_the_current_one(encoder, model, clip):
    clips, tower = StepClips(encoder, 0.5, print, ahead=True), Tower(model)
    coming = [*(clip(f"coming {number}", 5) for number in range(4)), clip("broken later", 3, text="broken later")]

    def prompt(number, one):
        visual = Visual(np.arange(one.plan.tokens, dtype=np.int32), path=one.path, plan=one.plan)
        return Prompt(number, visual.positions, "", (), "", None, visual=(visual,) * 2)

    prompts = [prompt(*each) for each in enumerate(coming)]

    async def encoded(number):
        """Encode a step with this clip alone; assert that its embeddings are correct."""
        for group in await clips.encode(make_groups([prompts[number]], 1, 0, 1), "training", check_failures=False):
            for visual in group.samples[0].prompt.visual:
                assert torch.equal(visual.source.read(), unsharded(tower, coming[number]))

    clips.prefetch(prompts, "training")
    await encoded(0)  # before any other clip has started
    metrics = await clips.release("training")
    assert (metrics["video/encoded_ahead_tokens"], metrics["video/encoded_tokens"]) == (0, 5 * 6)

    clips.prefetch(prompts, "training")
    clips.prefetch(prompts[:1], "training")  # the previous prefetch has not finished
    await asyncio.wait_for(clips._coming, 120)
    metrics = await clips.release("training")
    assert metrics["video/encode_ahead_ranks"] in (1, 2, 3) and metrics["video/encoded_over_unique_tokens"] == 1
    assert metrics["video/encoded_ahead_tokens"] == metrics["video/encoded_tokens"] == 3 * 5 * 6
    assert (metrics["video/failed_clips"], metrics["video/dropped_groups"]) == (0, 0), (
        "the broken clip has not been requested"
    )
    for number in range(5):
        await encoded(number)
    metrics = await clips.release("training")
    assert (metrics["video/encoded_tokens"], metrics["video/cache_held_bytes"]) == (0, 0)
    assert (metrics["video/failed_clips"], metrics["video/dropped_groups"]) == (2, 1), "two occurrences in one prompt"
    clips.max_failure_rate = 1.0
    with pytest.raises(EngineError, match=r"1 of 1 prompts .* the first: [\s\S]*No prompt of the step is left"):
        await clips.encode(make_groups(prompts[4:], 1, 0, 1), "training")
    await clips.release("training")


async def test_held_embeddings_stay_and_a_full_cache_is_an_error(encoder, clip):
    for holder in ("step 1", "step 2", "sharing", "second", "pair", "failures"):
        await encoder.release(holder)
    half = [clip(f"half {i}", 1, 28 * 40, 28 * 40) for i in range(2)]  # 1600 tokens, 400 KiB
    (held,) = await encoder.encode(half[:1], "held")
    too_large = clip("too large", 2, 28 * 40, 28 * 50)
    with pytest.raises(EngineError, match="embedding cache is full"):
        await encoder.encode([too_large, *half], "too much")
    assert held.read().shape == (1600, TEXT_HIDDEN)
    await encoder.release("held")
    await encoder.release("too much")
    assert isinstance((await encoder.encode(half[1:], "later"))[0], Embedding)
    await encoder.release("later")


async def test_clips_are_encoded_again_after_a_tower_update(encoder, model, clip, tmp_path):
    one = clip("learned from", 4)
    (before,) = await encoder.encode([one], "update")
    trained = Tower(write_small_video_llama3(tmp_path / "trained", SmallModel(seed=5)))
    save_file({f"model.{name}": tensor for name, tensor in trained.module.state_dict().items()}, tmp_path / "weights")
    await encoder.update_tower(tmp_path / "weights", updates=1)
    (after,) = await encoder.encode([one], "update")
    assert after.key != before.key
    assert torch.equal(after.read(), unsharded(trained, one))
