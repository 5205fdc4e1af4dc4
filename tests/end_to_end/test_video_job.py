"""A whole PPO job with clips and images from real files, some of which are damaged or missing."""

import base64
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlfuse.cluster import scratch
from rlfuse.events import read_events
from rlfuse.observe.tracking import read_metrics
from rlfuse.tasks.clips import SIGNS, WORDS, Clips, Kind, write_task
from rlfuse.tasks.small_video_models import SmallModel, byte_tokenizer, write_small_video_llama3

STEPS = 4
REWARD = '''
def first_letter(data_source, solution_str, ground_truth, extra_info=None):
    """How early in the alphabet the first word begins; any text has a reward."""
    return (ord(solution_str[0]) % 7) / 7 if solution_str else 0.0
'''


def damage(path: Path) -> None:
    """Zero the last third of the file: probing succeeds, decoding fails."""
    import av

    whole = path.rename(path.with_suffix(".whole.mp4"))
    with av.open(str(whole)) as source, av.open(str(path), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3].ljust(len(data), b"\0"))


def write_other_forms(folder: Path) -> Path:
    """Write the rows of the order task: one with a segment of its clip and a list of frames without markers, one whose
    clip is given as bytes."""
    rows = pq.read_table(folder / "order/train.parquet").to_pylist()
    first, second = rows[:2]
    first["videos"] = [
        first["videos"][0] | {"video_start": 2.0, "video_end": 6.0, "nframes": 3},
        {"video": [f"../place/images/train_{number:05}.png" for number in range(4)], "sample_fps": 1.0},
    ]
    first["prompt"][0]["content"] = first["prompt"][0]["content"].removeprefix("<video> ")
    content = (folder / "order" / second["videos"][0]["video"]).read_bytes()
    second["videos"] = [{"bytes": base64.b64encode(content).decode()}]
    (folder / "order/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "order/train.jsonl"


@pytest.fixture(scope="module")
def run(driven, tmp_path_factory):
    """Run the job; return (run folder, output). One clip is damaged, one clip and one image are missing."""
    folder = tmp_path_factory.mktemp("video_job")
    for kind in (Kind.ORDER, Kind.PLACE):
        (folder / kind).mkdir()
        write_task(folder / kind, Clips(train=8, val=2, kinds=(kind,), shortest_s=10, longest_s=30))
    damage(folder / "order/clips/train_00003.mp4")
    (folder / "order/clips/train_00005.mp4").unlink()
    (folder / "place/images/train_00005.png").unlink()
    (folder / "first_letter.py").write_text(REWARD)
    tokenizer = byte_tokenizer([*WORDS, *SIGNS])
    write_small_video_llama3(folder / "model", SmallModel(heads=4, layers=2, tower_heads=2), tokenizer)
    settings = {
        "algorithm": "ppo",
        "model.path": folder / "model",
        "data.train_files": f"[{write_other_forms(folder)},{folder}/place/train.parquet]",
        "data.val_files": f"[{folder}/order/val.parquet,{folder}/place/val.parquet]",
        "data.max_prompt_length": 600,
        "data.max_response_length": 8,
        "data.train_batch_size": 7,
        "actor.ppo_mini_batch_size": 7,
        "actor.optim.lr": 1e-6,
        "rollout.n": 3,
        "rollout.kv_cache_memory_mb": 64,
        "algorithm.use_kl_in_reward": "true",
        "reward.functions": f"[{folder}/first_letter.py:first_letter]",
        "video.sampling": "seed_vl",
        "video.levels": "[4]",
        "video.max_tokens": 128,
        "video.cache_mb": 64,
        "video.max_failure_rate": 0.5,
        "video.log_clips": 2,
        "trainer.total_training_steps": STEPS,
        "trainer.val_before_train": "false",
        "trainer.experiment_name": "run",
        "trainer.logger": "[console,wandb]",
    }
    status, text = driven("rlfuse_command", folder, "train", **settings)
    assert status == 0, text
    return folder / "runs/rlfuse/run", text


def test_bad_clips_drop_only_their_rows_and_groups_and_are_named(run):
    folder, printed = run
    assert "14 prompts" in printed and "7 with clips, 7 with images, 2 skipped for unusable clips or images" in printed
    assert "train_00005.mp4" in printed and "train_00005.png" in printed
    assert "train_00003.mp4" in printed and "prompts have clips or images that can't be used" in printed
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert len(rows) == STEPS
    # The row with the damaged clip occurs once per epoch of two steps.
    for epoch in (rows[:2], rows[2:]):
        assert sum(row["video/dropped_groups"] for row in epoch) == 1
    assert all(row["perf/total_num_tokens"] > 0 for row in rows)


def test_clips_are_encoded_once_and_prompts_run_once(run):
    folder, _ = run
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert all(row["video/encoded_over_unique_tokens"] == 1.0 for row in rows)
    run_again = [row["perf/computed_over_unique_tokens"] - 1 for row in rows]
    assert min(run_again) == 0 and max(run_again) < 1, "above 0 only if a group was scored before all had finished"
    later = {name: sum(row[f"video/cache_{name}"] for row in rows[2:]) for name in ("misses", "hits")}
    assert later == {"misses": 1, "hits": 14}, "only the unusable clip"
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    assert {"video/frames", "video/tokens", "video/level", "video/decode_s", "video/encode_s"} <= rows[0].keys()
    assert (
        rows[0]["video/prefill_s"] > 0
        and rows[0]["video/sequence_parallel_degree"] == 1.0
        and rows[0]["video/cache_bytes"] > 0
    )


def test_clips_of_the_next_step_are_decoded_during_the_current_one(run):
    """The first step is followed by the second, the last one by validation."""
    folder, _ = run
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    first, second, *_ = (row["video/prefetched_frames"] for row in rows)
    assert first == 0 and second > 0, "no clip of the second step was ready"
    spans = read_events(folder / "events.jsonl")
    steps = [span for span in spans if span.kind == "step"]
    prefetched = [span for span in spans if span.kind == "prefetch"]
    assert prefetched and all(span.where.startswith("encoder/") and span.attributes["bytes"] for span in prefetched)
    for step in (steps[0], steps[-1]):
        assert any(step.start < span.start < span.end < step.end for span in prefetched)


def test_contact_sheets_show_the_sampled_frames(run):
    folder, _ = run
    sheets = sorted((folder / "contact_sheets").glob("*.png"))
    assert len(sheets) == 2 * STEPS
    with Image.open(sheets[0]) as image:
        assert image.width > 400 and image.height > 100
    (table,) = folder.glob(
        "wandb/**/table/samples_*.json"
    )  # written after the last step, as trainer.log_samples_freq is 10
    content = json.loads(table.read_text())
    assert content["columns"][-1] == "clip" and any(row[-1] for row in content["data"])


def test_no_files_are_left_in_shared_memory(run):
    assert not scratch.abandoned(scratch.EMBEDDINGS)
