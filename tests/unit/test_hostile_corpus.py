"""A corpus of hostile inputs: responses, clips and images, rows, job files and run folders of third parties.

Each gives a result or an error that names the input, in bounded time and memory. Nothing in the inputs is executed,
and no other file is opened. The corpus is in hostile_responses.py, hostile_media.py and hostile_folders.py.
"""

import ctypes
import json
import os
import resource
import subprocess
import sys

import hostile_folders
import hostile_media
import hostile_responses
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlfuse.application import run_command
from rlfuse.cli import main as rlfuse
from rlfuse.config.compose import load
from rlfuse.config.schema import Config
from rlfuse.data.clips import ClipReader
from rlfuse.data.prompts import load_prompts
from rlfuse.data.rows import read_rows
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.errors import OK, USER_ERROR, DataError
from rlfuse.rewards.api.items import item_of_sample
from rlfuse.run.resume.acceptance import NothingToDo, accept
from rlfuse.tasks.small_video_models import SmallModel, write_small_video_llama3
from rlfuse.tools.evaluation import replay
from rlfuse.tools.evaluation.reward_table import score_items
from rlfuse.video.video_model import VideoModel

SECRET = "TOP-SECRET"
GIB = 1 << 20
"""In KiB, the unit of ru_maxrss."""
IN_OPEN = 0x20


def _parent(tmp_path):
    """Return a folder with a subfolder `outside`, and a function that returns whether the file in it was opened."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text(json.dumps({"step": 1, "secret": SECRET}))
    libc = ctypes.CDLL(None)
    events = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(events, os.fsencode(tmp_path / "outside"), IN_OPEN) >= 0

    def opened():
        try:
            return b"secret" in os.read(events, 4096)
        except BlockingIOError:
            return False

    return tmp_path, opened


@pytest.fixture
def parent(tmp_path):
    folder, opened = _parent(tmp_path)
    yield folder
    assert not opened() and not (folder / "marker").exists()


# Responses ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Return {name of a response: its outcomes}, scored in another process with a time limit."""
    folder = tmp_path_factory.mktemp("responses")
    (folder / "secret").write_text(SECRET)
    command = [sys.executable, hostile_responses.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and not (folder / "marker").exists(), done.stderr[-2000:]
    assert SECRET not in done.stdout + done.stderr
    return {row["name"]: row["found"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_responses.RESPONSES)
def test_every_verifier_scores_every_response(scored, name):
    assert scored[name].keys() == hostile_responses.VERIFIERS.keys()
    for outcome in scored[name].values():
        assert 0.0 <= outcome["value"] <= 1.0, outcome
    if name.startswith(("reads", "links")):
        assert scored[name]["code"]["value"] == 0.0, "printed the content of a file"


# Clips and images --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return {file: error or None}, the peak memory of the decoding processes, and whether `outside` was opened."""
    folder, opened = _parent(tmp_path_factory.mktemp("media"))
    media = folder / "media"
    media.mkdir()
    write_small_video_llama3(folder / "model", SmallModel(heads=2, layers=1, tower_heads=1, tower_layers=1))
    rows = [{"prompt": "plain"}]
    for name, (column, _) in hostile_media.MEDIA.items():
        hostile_media.write(media, name)
        rows.append({"prompt": "?", column: [name]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = Config()
    config.model.path, config.data.media_root = str(folder / "model"), str(media)
    config.data.max_prompt_length, config.data.filter_overlong_prompts = 2000, True
    config.video.max_failure_rate, config.video.decode_timeout_s = 1.0, 20.0
    reader = ClipReader(
        VideoModel.from_pretrained(config.model.path), config.video, load_tokenizer(config.model), 2, folder / "kept"
    )
    _, report = load_prompts([str(folder / "rows.jsonl")], load_tokenizer(config.model), config.data, reader)
    problems = {}
    for name in hostile_media.MEDIA:
        named = [line for line in report.unusable if f"/{name}: " in line]
        problems[name] = named[0] if named else None
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return problems, memory, opened()


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_media.MEDIA)
def test_unusable_clips_and_images_only_skip_their_row(shown, name):
    problems, memory, opened = shown
    assert not opened and memory < 3 * GIB
    problem = problems[name]
    assert problem is None or not any(word in problem for word in ("Error", "took longer", "crashed", "lost")), problem


# Rows --------------------------------------------------------------------------------------------------------------

NESTED = "[" * 400 + "]" * 400


def _parquet(**columns):
    def write(path):
        pq.write_table(pa.table(columns), path, compression="zstd")

    return write


ROWS = {  # file -> content and expected message; "" if the row is valid
    "nobody.jsonl": ('{"prompt": "?", "images": ["~nobody-here/a.png"]}', ""),
    "null.jsonl": ('{"prompt": "?", "videos": ["a\\u0000.mp4"]}', "a null character"),
    "frames.jsonl": ('{"prompt": "?", "videos": ["list.frames"]}', "names other files"),
    "device.jsonl": ('{"prompt": "?", "images": ["file:/dev/zero"]}', "outside of data.media_root"),
    "link.jsonl": ('{"prompt": "?", "videos": [["link/secret"]]}', "outside of data.media_root"),
    "loop.jsonl": (json.dumps({"prompt": "?", "videos": ["/".join(["loop"] * 500)]}), ""),
    "settings.jsonl": ('{"prompt": "?", "videos": [{"video": "a", "fps": NaN}]}', "fps"),
    "counts.jsonl": ('{"prompt": "?", "videos": [{"video": "a", "nframes": 1e308}]}', ""),
    "pixels.jsonl": ('{"prompt": "?", "images": [{"image": "a", "max_pixels": -1e999}]}', "max_pixels"),
    "place.jsonl": (
        '{"prompt": [{"role": "user", "content": [{"type": "video", "index": "x"}]}], "videos": ["a"]}', "",
    ),
    "nested.jsonl": (json.dumps({"prompt": "?", "extra": json.loads(NESTED)}), ""),
    "tools.jsonl": (json.dumps({"prompt": "?", "tools": "[" * 100_000}), "field tools"),
    "encoded.jsonl": (json.dumps({"prompt": '[{"role": "user", "content": ' + "[" * 100_000}), "not JSON"),
    "surrogate.jsonl": ('{"prompt": "?", "images": ["\\udcff.png"]}', "lone surrogate"),
    "base64.jsonl": (json.dumps({"prompt": "?", "images": ["data:image/png;base64," + "A" * 10**6 + "A"]}), "images"),
    "null.csv": ("prompt,images\n?,\0\n", "a null character"),
    "quote.csv": ('prompt\n"' + "x" * 1_000_000, "not CSV"),
    "columns.csv": (",".join(f"a{n}" for n in range(20_000)) + "\n" + "," * 10, "11 cells"),
    "rows.parquet": (_parquet(prompt=pa.nulls(20_000_000, pa.string())), "rows"),
    "text.parquet": (_parquet(prompt=["x" * 20_000_000]), "bytes"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_read_or_rejected_by_name(parent, monkeypatch, name):
    monkeypatch.setattr("rlfuse.data.rows.LARGEST", 1 << 20)
    (root := parent / "media").mkdir()
    (root / "link").symlink_to(parent / "outside")
    (root / "loop").symlink_to("loop")
    content, words = ROWS[name]
    (parent / name).write_text(content) if isinstance(content, str) else content(parent / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if not words:
        assert len(read_rows(str(parent / name), "prompt", media_root=str(root))) == 1
        return
    with pytest.raises(DataError, match=name) as refused:
        read_rows(str(parent / name), "prompt", media_root=str(root))
    assert words in str(refused.value) and len(str(refused.value)) < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIB


# Job files and run folders -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_folders.JOBS)
def test_hostile_job_files_are_rejected(parent, capsys, name):
    text = hostile_folders.JOBS[name].replace("{marker}", str(parent / "marker")).replace("{folder}", str(parent))
    (parent / "job.yaml").write_text(text)
    assert run_command(lambda: load([str(parent / "job.yaml")])) == USER_ERROR
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and "\x1b" not in shown and len(shown) < 8000


@pytest.fixture
def here(parent, monkeypatch):
    """Use `parent` as working folder and score rewards without Ray."""

    async def scored_here(samples, reward, prompt_key, trusts):
        items = [item_of_sample(sample, prompt_key) for sample in samples]
        return score_items(list(reward.functions), items, list(reward.weights), reward.model_path)

    monkeypatch.setattr(replay, "scored", scored_here)
    monkeypatch.chdir(parent)
    return parent


def resume(folder):
    config = Config()
    config.model.path, config.algorithm.adv_estimator = "somewhere", "grpo"
    config.trainer.default_local_dir, config.trainer.project_name = str(folder.parent.parent), folder.parent.name
    config.trainer.experiment_name, config.trainer.total_training_steps = folder.name, 10**6
    try:
        accept(config)
    except NothingToDo as end:
        print(end)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", hostile_folders.FOLDERS)
def test_hostile_run_folders_are_read_or_rejected(here, capsys, name):
    folder = hostile_folders.run_folder(here, name)
    commands = [["runs", "."], ["watch", "run"], ["report", "run"], ["trace", "run"], ["reward", "replay", "run"]]
    for command in [*commands, ["resume"]]:
        status = run_command(lambda: resume(folder)) if command == ["resume"] else rlfuse(command)
        shown = "".join(capsys.readouterr())
        assert status in (OK, USER_ERROR) and "Traceback" not in shown, (command, shown[-2000:])
        assert "\x1b" not in shown and SECRET not in shown, (command, shown[-2000:])
    page = (folder / "report.html").read_text() if (folder / "report.html").exists() else ""
    assert "<script>fetch" not in page and SECRET not in page
