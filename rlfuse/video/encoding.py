"""Encode the clips of a batch sequence-parallel over all ranks, each clip once, into the nodes' caches.

    encode: keys -> lookup in the store -> missing ones sharded over ranks -> room reserved on a clip's home node
      -> encoder/0: part, part, ... --rows--> /dev/shm of its node -> committed, copied to every other node -> handle

Embeddings are bit-equal to those of the unsharded tower on equal devices. A clip that cannot be encoded is a
`ClipFailure`; the others continue. A rank that cannot be started, or a full cache, is an `EngineError`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from rlfuse.errors import EngineError
from rlfuse.events import Span
from rlfuse.samples import Embedding, FramePlan
from rlfuse.video.cache import CacheSettings, EmbeddingStore
from rlfuse.video.embedding import content_hash, embedding_key
from rlfuse.video.encoder_handle import EncoderHandle, EncoderPlacement
from rlfuse.video.encoder_rank import Encoded, EncoderSettings, FrameReader, Frames, Part, PartFailure
from rlfuse.video.sharding import ClipLoad, UnitRange, cost, pool_size, shard

READERS = 4
"""Files hashed at a time; fewer than the event loop's threads, so that timeouts do not include waiting for one."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Clip of a sample; `id` names it in messages."""

    id: str
    path: str
    plan: FramePlan


@dataclass(frozen=True, slots=True)
class ClipFailure:
    """Reason why a clip has no embedding."""

    clip: str
    message: str


@dataclass(slots=True)
class _Job:
    """Clip to look up and, if missing, to encode."""

    clip: Clip
    content: str
    key: str
    tokens: int
    home: str = ""
    target: str = ""
    reserved: set[tuple[str, str]] = field(default_factory=set)
    left: int = 0
    executed: int = 0
    outcome: Embedding | ClipFailure | None = None


@dataclass(slots=True)
class _Tally:
    """Counts since the last `metrics`."""

    hits: int = 0
    misses: int = 0
    failed: int = 0
    executed: int = 0
    prefetched: int = 0
    ahead: int = 0
    pool: int = 0
    unique: dict[str, int] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    heaviest: int = 0
    mean: float = 0.0


class SequenceParallelEncoder:
    """Encoder with ranks at `placements`, and caches on their nodes and on `nodes`."""

    def __init__(
        self,
        encoder: EncoderSettings,
        cache: CacheSettings,
        frames: FrameReader,
        placements: Sequence[EncoderPlacement],
        timeout_s: float,
        environment: dict[str, str] | None = None,
        nodes: Sequence[str] = (),
    ):
        if not placements:
            raise ValueError("placements: at least one encoder rank is needed, got none")
        self.timeout_s, self.nodes = timeout_s, nodes
        self.frozen_only = cache.disk is not None
        self.store = EmbeddingStore(cache, timeout_s, environment or {})
        self.ranks = [EncoderHandle(i, placement, encoder, frames, timeout_s) for i, placement in enumerate(placements)]
        self._one_batch = asyncio.Lock()
        self._reading = asyncio.Semaphore(READERS)
        self._tally = _Tally()
        self._token_s = 0.0  # seconds per token and rank, from the last `metrics`

    async def start(self) -> None:
        """Start ranks and caches. EngineError if ranks load different towers."""
        await asyncio.gather(*(rank.start() for rank in self.ranks))
        self._take_version()
        self.shape = self.ranks[0].shape
        await self.store.start({rank.memory: rank.node for rank in self.ranks} | {node: node for node in self.nodes})

    async def encode(self, clips: Sequence[Clip], holder: str) -> list[Embedding | ClipFailure]:
        """Return a handle or a failure for each clip, in order; handles are held for `holder` until its release."""
        async with self._one_batch:
            jobs, unique = await self._jobs(clips)
            await asyncio.gather(*(self._look_up(job, holder) for job in unique.values()))
            missing = [job for job in unique.values() if job.outcome is None]
            self._tally.hits += len(unique) - len(missing)
            self._tally.misses += len(missing)
            await self._encode(missing, self.ranks, holder)
            await asyncio.gather(*(self._replicate(job, holder) for job in unique.values()))
            results = [job if isinstance(job, ClipFailure) else _named(unique[job.key], job.clip) for job in jobs]
            self._tally.failed += sum(isinstance(result, ClipFailure) for result in results)
            return results

    async def prefetch(self, clips: Sequence[Clip]) -> None:
        """Start decoding the frames that ranks would encode next; unused frames are dropped."""
        async with self._one_batch:
            _, unique = await self._jobs(clips)
            known = await asyncio.gather(*map(self.store.has, unique))
            missing = [job for job, found in zip(unique.values(), known, strict=True) if not found]
            shards = shard([self._load(job.clip.plan) for job in missing], len(self.ranks), self.shape.step)
            frames = [[self._frames(run, missing[run.clip]) for run in runs] for runs in shards]
            await asyncio.gather(*(rank.prefetch(each) for rank, each in zip(self.ranks, frames, strict=True)))

    async def encode_ahead(
        self, clips: Sequence[Clip], holder: str, within_s: float, called_off: Callable[[], bool]
    ) -> None:
        """Cache clips for `holder` with as few ranks as finish `within_s` (0: unknown), until `called_off`."""
        async with self._one_batch:
            _, unique = await self._jobs(clips)
            for (
                job
            ) in unique.values():  # one after the other, so that nothing is running if one raises for lack of room
                await self._look_up(job, holder)
            missing = [job for job in unique.values() if job.outcome is None]
            tokens = sum(job.tokens for job in missing)
            size = pool_size(tokens * self._token_s, within_s, len(self.ranks))
            pool = [self.ranks[number * len(self.ranks) // size] for number in range(size)]
            for few in (missing[first : first + size] for first in range(0, len(missing), size)):
                if called_off():
                    return
                self._tally.pool = size
                await self._encode(few, pool, holder)
                for job in few:
                    await self._replicate(job, holder)
                self._tally.ahead += sum(job.tokens for job in few if isinstance(job.outcome, Embedding))

    async def release(self, holder: str) -> None:
        await self.store.release(holder)

    async def update_tower(self, weights: str | Path, updates: int) -> None:
        """Load the weights of a trained tower into all ranks; keys include its version, so no stale entry is found."""
        if self.frozen_only:
            raise ValueError("the disk tier needs a frozen tower: disable it, since trained weights never recur")
        async with self._one_batch:
            await asyncio.gather(*(rank.update(str(weights), updates) for rank in self.ranks))
            self._take_version()

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return spans of all ranks since the last call. `collect`: run the garbage collectors first."""
        drained = await asyncio.gather(*(rank.drain(collect) for rank in self.ranks))
        return [span for spans in drained for span in spans]

    async def metrics(self) -> dict[str, float]:
        """Return `video/*` since the last call; cache bytes are current, other cache counts are since the start."""
        tally, self._tally = self._tally, _Tally()
        unique, lookups = sum(tally.unique.values()), tally.hits + tally.misses
        counts = await self.store.counters()
        if tally.executed:
            self._token_s = (tally.seconds["encode_s"] + tally.seconds["decode_wait_s"]) / tally.executed
        return {
            "video/encoded_over_unique_tokens": tally.executed / unique if unique else 1.0,
            "video/encoded_tokens": float(tally.executed),
            "video/prefetched_frames": float(tally.prefetched),
            "video/encoded_ahead_tokens": float(tally.ahead),
            "video/encode_ahead_ranks": float(tally.pool),
            "video/failed_clips": float(tally.failed),
            "video/shard_imbalance": tally.heaviest / tally.mean if tally.mean else 1.0,
            **{f"video/{name}": tally.seconds[name] for name in ("decode_s", "decode_wait_s", "encode_s")},
            "video/cache_hits": float(tally.hits),
            "video/cache_misses": float(tally.misses),
            "video/cache_hit_ratio": tally.hits / lookups if lookups else 1.0,
            **{f"video/cache_{name}": float(count) for name, count in counts.items()},
        }

    async def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        await self.store.close()

    def _take_version(self) -> None:
        first = self.ranks[0]
        if wrong := [rank.name for rank in self.ranks if (rank.version, rank.shape) != (first.version, first.shape)]:
            raise EngineError(
                f"{', '.join(wrong)} loaded a different tower than {first.name}: use one model on all nodes"
            )
        self.version = first.version

    async def _jobs(self, clips: Sequence[Clip]) -> tuple[list[_Job | ClipFailure], dict[str, _Job]]:
        jobs = await asyncio.gather(*(self._job(clip) for clip in clips))
        return jobs, {job.key: job for job in jobs if isinstance(job, _Job)}

    async def _job(self, clip: Clip) -> _Job | ClipFailure:
        plan, shape, what = clip.plan, self.shape, f"{clip.id} ({clip.path})"
        try:
            async with self._reading:
                content = await asyncio.wait_for(asyncio.to_thread(content_hash, clip.path), self.timeout_s)
            tokens = shape.row(plan, shape.units(len(plan.times)))
        except TimeoutError:
            return ClipFailure(clip.id, f"{what}: could not be read within {self.timeout_s:g} s")
        except (OSError, ValueError) as error:
            return ClipFailure(clip.id, f"{what}: {error}")
        if not tokens or (plan.tokens, plan.temporal_patch) != (tokens, shape.temporal_patch):
            return ClipFailure(
                clip.id,
                f"{what}: the plan expects {plan.tokens} tokens with temporal_patch="
                f"{plan.temporal_patch}, the tower gives {tokens} with {shape.temporal_patch} for {len(plan.times)} "
                f"frames of {plan.height}x{plan.width}: plan for this tower",
            )
        return _Job(clip, content, embedding_key(content, plan, self.version), tokens)

    async def _look_up(self, job: _Job, holder: str) -> None:
        job.outcome = await self.store.lookup(job.key, job.tokens, self.shape.hidden, holder)

    async def _replicate(self, job: _Job, holder: str) -> None:
        if isinstance(job.outcome, Embedding):
            job.outcome = await self.store.replicate(job.key, job.tokens, self.shape.hidden, holder)

    async def _encode(self, jobs: list[_Job], ranks: Sequence[EncoderHandle], holder: str) -> None:
        loads = [self._load(job.clip.plan) for job in jobs]
        shards = shard(loads, len(ranks), self.shape.step)
        costs = [cost(runs, loads) for runs in shards]
        self._tally.heaviest += max(costs)
        self._tally.mean += sum(costs) / len(costs)
        shares, work = list(zip(ranks, shards, strict=True)), list[asyncio.Task[None]]()
        self._choose_homes(jobs, shares)
        try:
            for job in jobs:
                job.target = await self._reserve(job, job.home, job.key, job.tokens, holder)
            work += [asyncio.create_task(self._serve(rank, runs, jobs, holder)) for rank, runs in shares]
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()  # no-op unless a task failed
            await asyncio.gather(*work, return_exceptions=True)
            left_over = [entry for job in jobs for entry in job.reserved]
            await asyncio.gather(*(self.store.abandon(*entry) for entry in left_over))

    def _load(self, plan: FramePlan) -> ClipLoad:
        patches = self.shape.unit_patches(plan.height, plan.width, plan.merge)
        return ClipLoad(self.shape.units(len(plan.times)), self.shape.cost.unit(patches))

    def _choose_homes(self, jobs: list[_Job], shares: list[tuple[EncoderHandle, list[UnitRange]]]) -> None:
        units: list[Counter[str]] = [Counter() for _ in jobs]
        for rank, runs in shares:
            for run in runs:
                units[run.clip][rank.memory] += run.units
                jobs[run.clip].left += 1
        for job, of_memory in zip(jobs, units, strict=True):
            job.home = of_memory.most_common(1)[0][0]

    async def _serve(self, rank: EncoderHandle, runs: list[UnitRange], jobs: list[_Job], holder: str) -> None:
        for run, after in zip_longest(runs, runs[1:]):
            job = jobs[run.clip]
            if job.outcome is not None:
                continue
            upcoming = after and self._frames(after, jobs[after.clip])
            first_row = self.shape.row(job.clip.plan, run.first)
            if rank.memory == job.home:
                part = Part(self._frames(run, job), job.target, first_row)
                self._note(job, await rank.encode(part, upcoming))
            else:
                await self._encode_away(rank, run, job, first_row, upcoming, holder)
            if not job.left and job.outcome is None:
                assert job.executed == job.tokens, f"clip {job.clip.id}: {job.executed} tokens, planned {job.tokens}"
                job.outcome = await self.store.commit(job.home, job.key)
                job.reserved.clear()
                self._tally.executed += job.executed
                self._tally.unique[job.key] = job.tokens

    async def _encode_away(
        self, rank: EncoderHandle, run: UnitRange, job: _Job, first_row: int, upcoming: Frames | None, holder: str
    ) -> None:
        entry = f"{job.key}-{run.first}"
        tokens = self.shape.row(job.clip.plan, run.last) - first_row
        target = await self._reserve(job, rank.memory, entry, tokens, holder)
        done = await rank.encode(Part(self._frames(run, job), target, 0), upcoming)
        if isinstance(done, Encoded) and job.outcome is None:
            await self.store.move(rank.memory, entry, job.home, job.key, first_row)
            job.reserved.discard((rank.memory, entry))
        self._note(job, done)

    def _note(self, job: _Job, done: Encoded | PartFailure) -> None:
        if isinstance(done, PartFailure):
            job.outcome = job.outcome or ClipFailure(job.clip.id, done.message)
            return
        job.left -= 1
        job.executed += done.tokens
        self._tally.prefetched += done.prefetched
        self._tally.seconds.update(decode_s=done.decode_s, decode_wait_s=done.wait_s, encode_s=done.encode_s)

    def _frames(self, run: UnitRange, job: _Job) -> Frames:
        clip, size = job.clip, self.shape.temporal_patch
        last = min(run.last * size, len(clip.plan.times))
        return Frames(clip.id, clip.path, job.content, clip.plan, run.first * size, last)

    async def _reserve(self, job: _Job, memory: str, key: str, tokens: int, holder: str) -> str:
        job.reserved.add((memory, key))  # before the call, which is executed even if it is cancelled here
        return await self.store.reserve(memory, key, tokens, self.shape.hidden, holder)


def _named(job: _Job, clip: Clip) -> Embedding | ClipFailure:
    """Return the job's outcome with the id of this clip; several clips may share their content."""
    if isinstance(job.outcome, ClipFailure):
        return ClipFailure(clip.id, job.outcome.message)
    return job.outcome
