"""Steps on one long clip, four variants side by side: nothing reused; encoded once at degree 1, 2 and the chosen one.

    python tests/benchmarks/long_video_steps.py [--frames 8 16 ... 1024] [--repeats 3] [--answers 4] [--out FOLDER]

A step consists of a rollout of `--answers` responses of 32 tokens to a question about one clip, their old and reference
log-probs, and an update (one mini-batch). All parts are real: an mp4 file, `DecodePool`, `SequenceParallelEncoder` on
two ranks, a vLLM engine that receives embeddings, and a `TrainerGroup` of two ranks, each on a core; the results mean
little with fewer than two cores. The model is a random VideoLLaMA3 (float32; a frame has 4 visual tokens and one
timestamp token). Rewards and weight sync are omitted in all variants; the learning rate is 0, so that all steps do the
same work.

- none: as in systems without reuse, each response decodes and encodes the clip and runs its prompt in all four passes;
- once: the clip is encoded once and the prompt runs once for all responses, on one rank;
- once, 2 ranks: in addition, every pass of the trainer is split over both ranks;
- ours: split where that is predicted to be faster.

The variants alternate within each repetition, starting with a different one each time. Each step gets files with new
content, so that no cache contains them; all variants must sample the same tokens. Last, on four ranks: the peak memory
of a rank during an update of the longest clip, above its level before, at degree 1, 2 and 4. Prints tables; writes
`long_video_steps.json` and `.png`. `long_video_tables.py` combines several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import ray
from ray._private.serialization import SerializationContext
from rich.console import Console
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
import sequence_parallel
from long_video_tables import PARTS, middle, picture, show
from sequence_parallel import Forced, measured

from rlfuse.cluster import placement
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.schema import Config, ModelConfig
from rlfuse.engines.rollout.rollout_handle import RolloutHandle
from rlfuse.engines.trainer.sequence_parallel_packing import Share
from rlfuse.engines.vllm.rollout_worker import RolloutWorker
from rlfuse.engines.vllm.setup import rollout_env
from rlfuse.observe.metrics import repetition
from rlfuse.protocols import Sampling
from rlfuse.samples import Embedding, Prompt, Response, Row, Sample, Visual, make_groups
from rlfuse.tasks.small_video_models import IMAGE, VIDEO, SmallModel, byte_tokenizer, write_small_video_llama3
from rlfuse.video.cache import CacheSettings
from rlfuse.video.decode_pool import DecodePool
from rlfuse.video.encoder_handle import EncoderPlacement
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.encoding import Clip, SequenceParallelEncoder
from rlfuse.video.models.video_llama_3 import VideoLlama3
from rlfuse.video.plan import FixedSampling, VideoPlan, plan_video
from rlfuse.video.prompt import VisualTokens, assemble

ray.cloudpickle.register_pickle_by_value(sequence_parallel)  # ranks can't import from tests/
WAYS: dict[str, int | None] = {"none": 1, "once": 1, "once, 2 ranks": 2, "ours": None}
"""Variant -> degree, None: chosen."""
RANKS, RESPONSE, FPS, SIDE, TOKENS = 2, 32, 8, 56, 4
LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODEL = SmallModel(heads=4, layers=2, tower_heads=4, tower_layers=2)


class Reader:
    """Frames for an encoder rank, decoded in a separate process."""

    def __init__(self) -> None:
        self.pool = DecodePool(timeout_s=120.0)

    def __call__(self, path: str, plan: VideoPlan, first: int, last: int) -> np.ndarray:
        return self.pool.decode(path, plan, first, last)


class Traffic:
    """Bytes that the driver sends to and receives from other processes."""

    def __init__(self) -> None:
        self.bytes = 0
        serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

        def sent(context: Any, value: Any) -> Any:
            done = serialize(context, value)
            self.bytes += done.total_bytes
            return done

        def got(context: Any, objects: Sequence[Any], *others: Any) -> Any:
            self.bytes += sum(len(data) for data, *_ in objects if data is not None)
            return deserialize(context, objects, *others)

        SerializationContext.serialize, SerializationContext.deserialize_objects = sent, got


class Bench:
    """Engine, encoder and trainer ranks shared by all steps."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.answers, self.traffic = folder, options.answers, Traffic()
        self.numbers, lengths = itertools.count(), sorted({*LENGTHS, *options.frames})
        self.clip = write_clip(folder / "clip.mp4", max(lengths))
        with DecodePool() as pool:
            [facts] = pool.probe([str(self.clip)])
        self.plans = {frames: plan_video(facts, FixedSampling(frames, TOKENS)) for frames in lengths}
        words = {piece.text: None for plan in self.plans.values() for piece in plan.pieces}
        write_small_video_llama3(folder / "whole", MODEL, byte_tokenizer(list(words)))
        self.text = str(VideoLlama3.export(folder / "whole", folder / "text"))
        self.tokenizer = AutoTokenizer.from_pretrained(self.text)

    async def start(self, slots: placement.Slots) -> None:
        """Start encoder ranks, the engine and trainer ranks."""
        environment = worker_environment("cpu")
        place = EncoderPlacement({"num_cpus": 0, "runtime_env": {"env_vars": environment}})
        settings = EncoderSettings(str(self.folder / "whole"), step=8)
        self.encoder = SequenceParallelEncoder(
            settings, CacheSettings(256 << 20), Reader(), [place] * RANKS, 600.0, environment
        )
        await self.encoder.start()
        options = {"num_cpus": 0, "max_concurrency": 1000, "runtime_env": {"env_vars": rollout_env("cpu")}}
        worker = ray.remote(RolloutWorker).options(**options)
        self.engine = RolloutHandle(lambda: worker.remote(0), "rollout/0", 600.0)
        model, rollout = ModelConfig(path=self.text, dtype="float32"), RolloutConfig(kv_cache_memory_mb=256)
        await self.engine.start(model, rollout, MODEL.context, "cpu")
        await self.trainer(slots, RANKS)

    async def trainer(self, slots: placement.Slots, ranks: int) -> None:
        """Start trainer ranks that support all sequence-parallel degrees."""
        config = Config()
        config.trainer.n_gpus_per_node = config.training.ulysses_sequence_parallel_size = ranks
        config.model.path, config.model.dtype, config.algorithm.adv_estimator = self.text, "float32", "grpo"
        config.data.max_response_length, config.actor.ppo_max_token_len_per_gpu = RESPONSE, MODEL.context
        config.actor.use_kl_loss, config.actor.optim.lr = True, 0.0
        slots = replace(slots, count=ranks, cores=slots.cores and slots.cores[:ranks])
        self.group, _ = await Forced.start(config, slots, slots.cores)
        await self.group.measure()

    async def step(self, way: str, frames: int) -> dict[str, Any]:
        """Run one step; return its seconds in total and by part, and what was sent, run and sampled."""
        number, passes = next(self.numbers), 4 if way == "none" else 1
        files = [[self.copy(f"{number}-{at}-{i}") for i in range(self.answers)] for at in range(passes)]
        await self.engine.actor.__ray_call__.remote(forget_prefixes)
        await asyncio.gather(self.encoder.metrics(), self.group.drain())
        self.group.degree, self.traffic.bytes = WAYS[way], 0
        watch = Watch()
        shown = await watch.timed("encode", self.encode(files[0], frames, way))
        samples = self.samples(frames, shown)
        responses = await watch.timed("rollout", self.rollout(samples))
        rows = [Row(s.prompt.token_ids, responses[s.id].token_ids, id=s.id) for s in samples]
        advantages = np.random.default_rng(0).normal(size=len(rows))
        tensors = [{"advantages": np.full(len(row.response_ids), a)} for row, a in zip(rows, advantages, strict=True)]
        for at, part in enumerate(PARTS[2:], start=1):
            if way == "none":
                shown = await watch.timed("encode", self.encode(files[at], frames, way))
            seen = [(Visual(samples[0].prompt.visual[0].positions, embedding),) for embedding in shown]
            rows = [replace(r, tensors=t, visual=v) for r, t, v in zip(rows, tensors, seen, strict=True)]
            if part == "update":
                await watch.timed(part, self.update(rows))
                break
            model = "actor" if part == "old" else "ref"
            found = await watch.timed(part, self.group.score((model,), rows))
            for of_row, scores in zip(tensors, found[model].arrays, strict=True):
                of_row[f"{part}_log_probs"] = scores
        done = await self.measurements(frames, rows, samples, responses)
        await self.encoder.release("step")
        for path in itertools.chain(*files):
            path.unlink()
        return {"seconds": sum(watch.seconds.values()), "parts": watch.seconds} | done

    async def encode(self, files: list[Path], frames: int, way: str) -> list[Embedding]:
        """Return an embedding per response; without reuse they are separate, else the same."""
        await self.encoder.release("step")
        mine = files if way == "none" else files[:1]
        clips = [Clip(path.name, str(path), self.plans[frames]) for path in mine]
        found = await self.encoder.encode(clips, "step")
        assert all(isinstance(each, Embedding) for each in found), found
        return found * (len(files) // len(found))

    async def rollout(self, samples: Sequence[Sample]) -> dict[str, Response]:
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=RESPONSE)
        return {name: response async for name, response in self.engine.generate(samples, sampling)}

    async def update(self, rows: Sequence[Row]) -> None:
        await self.group.accumulate(("actor",), rows)
        await self.group.step("actor", [len(row.response_ids) for row in rows])

    async def measurements(
        self, frames: int, rows: list[Row], samples: list[Sample], responses: dict[str, Response]
    ) -> dict[str, Any]:
        """Return what the step sent, encoded, ran and padded; assert that trainer and engine agree."""
        sent, video, spans = self.traffic.bytes, await self.encoder.metrics(), await self.group.drain()
        for sample in samples:
            sample.response = responses[sample.id]
        scoring = [span for span in spans if span.kind in ("old_log_prob", "ref") and span.samples]
        needed = 2 * planned(self.group._plan(rows, None, 3), rows)
        off = max(np.abs(row.tensors["old_log_probs"] - responses[row.id].log_probs).max() for row in rows)
        assert off < 1e-3, f"engine and trainer disagree by {off}"
        return {
            "bytes": sent,
            "tokens": rows[0].tokens,
            "encoded / unique": video["video/encoded_tokens"] / self.plans[frames].tokens,
            "run / unique": repetition(spans, {sample.id: sample for sample in samples})[
                "perf/computed_over_unique_tokens"
            ],
            "needed": needed,
            "padding": sum(span.attributes["run"] for span in scoring) - needed,
            "degrees": [max(s.attributes["degree"] for s in spans if s.kind == kind) for kind in ("ref", "backward")],
            "drawn": [responses[sample.id].token_ids.tolist() for sample in samples],
        }

    def samples(self, frames: int, shown: Sequence[Embedding]) -> list[Sample]:
        """Return one sample of the group per embedding."""
        visual, plan = VisualTokens(VIDEO, IMAGE), self.plans[frames]
        prompt = assemble(self.tokenizer, "<video>what happens, and when?", [plan], visual)
        clip = Visual(prompt.positions[0], path="clip.mp4", plan=plan)
        shown_prompt = Prompt(0, prompt.token_ids, "", (), "clips", None, visual=(clip,))
        [group] = make_groups([shown_prompt], len(shown), run_seed=0, step=frames)
        for sample, embedding in zip(group.samples, shown, strict=True):
            sample.prompt = replace(shown_prompt, visual=(replace(clip, source=embedding),))
        return group.samples

    def copy(self, name: str) -> Path:
        """Return a copy of the clip with different bytes: an appended box that decoders ignore."""
        path = Path(shutil.copy(self.clip, self.folder / f"{name}.mp4"))
        with path.open("ab") as file:
            file.write(struct.pack(">I4s", 8 + len(name), b"free") + name.encode())
        return path

    async def memory(self, slots: placement.Slots, frames: int) -> dict[int, float]:
        """Return the peak MiB of a rank in an update of one response, by degree, on four ranks."""
        await self.engine.stop()
        for rank in self.group.ranks:
            ray.kill(rank)
        await self.trainer(replace(slots, cores=None), 4)
        [sample] = self.samples(frames, await self.encode([self.clip], frames, "once"))
        tensors = {name: np.zeros(RESPONSE) for name in ("old_log_probs", "ref_log_probs", "advantages")}
        seen = sample.prompt.visual
        rows, found = [Row(sample.prompt.token_ids, np.full(RESPONSE, 7, np.int32), tensors, "0", seen)], {}
        for degree in (1, 2, 4):
            self.group.degree = degree
            await self.group.accumulate(("actor",), rows)
            _, found[degree] = await measured(self.group, lambda: self.group.accumulate(("actor",), rows))
        return found


class Watch:
    """Seconds of a step by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    async def timed(self, part: str, work: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await work
        self.seconds[part] += time.perf_counter() - began
        return result


def forget_prefixes(worker: RolloutWorker) -> None:
    """Reset the prefix cache, as the engine does for new weights."""
    loop = worker._engine.output_handler.get_loop()
    assert asyncio.run_coroutine_threadsafe(worker._engine.reset_prefix_cache(), loop).result(30)


def planned(shares: Sequence[Sequence[Share]], rows: Sequence[Row]) -> int:
    """Return the tokens of all micro-batches without padding: prompts as often as they run, and responses."""
    units = [share for rank, mine in enumerate(shares) for share in mine if share.rows and rank % share.degree == 0]
    prompts = [{rows[i].prompt_key: len(rows[i].prompt_ids) for i in unit.rows} for unit in units]
    return sum(map(sum, (each.values() for each in prompts))) + sum(len(row.response_ids) for row in rows)


def write_clip(path: Path, frames: int) -> Path:
    """Write H.264 with a keyframe every two seconds and a new picture every second."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"preset": "ultrafast", "g": str(2 * FPS)})
        stream.height = stream.width = SIDE
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            if number % FPS == 0:
                blocks = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                pixels = np.ascontiguousarray(np.kron(blocks, np.ones((SIDE // 4, SIDE // 4, 1), np.uint8)))
            frame = av.VideoFrame.from_ndarray(np.roll(pixels, number, axis=1), "rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


async def measure(bench: Bench, slots: placement.Slots, options: argparse.Namespace) -> dict[str, Any]:
    """Run all steps of all lengths and append each to the file; the first one is warm-up."""
    file = options.out / "long_video_steps.json"
    await bench.start(slots)
    found: dict[str, Any] = {"costs": repr(bench.group.costs), "steps": {}, "memory": {}}
    for way in WAYS:
        await bench.step(way, min(options.frames))
    for frames in sorted(options.frames):
        steps, names = {way: [] for way in WAYS}, list(WAYS)
        for turn in range(options.repeats):
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                steps[way].append(await bench.step(way, frames))
        drawn = [step.pop("drawn") for step in itertools.chain(*steps.values())]
        assert all(each == drawn[0] for each in drawn), "the variants sampled different tokens"
        found["steps"][frames] = steps
        print(frames, {way: f"{middle(steps[way]):.2f}" for way in WAYS}, flush=True)
        file.write_text(json.dumps(found, indent=1))
    if options.memory:
        found["memory"] = await bench.memory(slots, max(options.frames))
    file.write_text(json.dumps(found, indent=1))
    await bench.encoder.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the part with four ranks")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    config = Config()
    config.trainer.n_gpus_per_node, config.cluster.device = 4, "cpu"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        try:
            slots = asyncio.run(placement.start(config))
            slots = replace(slots, cores=tuple(sorted(os.sched_getaffinity(0))[:RANKS]))
            found = asyncio.run(measure(bench, slots, options))
        finally:
            placement.stop()
    show(found, Console(width=200))
    picture(found, options.out / "long_video_steps.png")


if __name__ == "__main__":
    main()
