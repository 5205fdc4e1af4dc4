"""`rlfuse push`: uploads and error messages."""

import json
from pathlib import Path

import pytest
from hub_server import serving
from huggingface_hub import ModelCard, constants

from rlfuse.cli import main as rlfuse
from rlfuse.tools.evaluation.push import card_of
from rlfuse.tools.evaluation.source import find

CONFIG = """
data: {train_files: [/home/someone/gsm8k/train.parquet], train_batch_size: 8}
model: {path: Qwen/Qwen2.5-0.5B-Instruct}
algorithm: {adv_estimator: grpo}
reward: {functions: [{path: "/home/someone/my_reward.py:compute_score", kwargs: {api_key: "***"}}], weights: []}
rollout: {tensor_model_parallel_size: 1}
trainer: {nnodes: 1, n_gpus_per_node: 1}
"""


@pytest.fixture
def run(tmp_path):
    """Return a run folder of four steps with a checkpoint after step 2 and an incomplete one."""
    for name in ("global_step_2", "global_step_4"):
        (tmp_path / name / "actor" / "huggingface").mkdir(parents=True)
        (tmp_path / name / "actor" / "huggingface" / "config.json").write_text("{}")
        (tmp_path / name / "actor" / "huggingface" / "model.safetensors").write_bytes(b"w" * 1000)
    (tmp_path / "global_step_2" / "COMPLETE").touch()
    (tmp_path / "global_step_2" / "run.json").write_text('{"step": 2}')
    (tmp_path / "config.yaml").write_text(CONFIG)
    rows = [{"step": 0, "val-core/gsm8k/acc/mean@1": 0.25}]
    rows += [{"step": step, "critic/score/mean": step / 4} for step in (1, 2, 3, 4)]
    rows[2]["val-core/gsm8k/acc/mean@1"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def hub(monkeypatch):
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        files = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


def test_the_newest_complete_checkpoint_is_uploaded_with_a_model_card(run, hub, capsys):
    assert rlfuse(["push", str(run), "someone/my-model", "--private"]) == 0
    assert hub.private == {"someone/my-model": True}
    files = hub.repos["someone/my-model"]["main"]
    assert files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert files["model.safetensors"] == b"w" * 1000
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B-Instruct" and card.data.library_name == "transformers"
    assert card.data.tags == ["rlfuse", "reinforcement-learning", "grpo"]
    facts = ("| Mean reward | 0.250 → 0.500 |", "gsm8k/acc/mean@1 | 0.250 → 0.500", "| Steps | 2 of 8 prompts |")
    for text in (*facts, "gsm8k/train.parquet", "compute_score", 'pipeline("text-generation", "someone/my-model")'):
        assert text in card.text, card.text
    assert "/home/someone" not in card.content and "api_key" not in card.content
    assert f"pushed  {hub.address}/someone/my-model" in capsys.readouterr().out


def test_a_local_folder_is_not_a_base_model(run, monkeypatch):
    monkeypatch.chdir(run)
    (run / "models" / "small").mkdir(parents=True)
    for base in ("models/small", "~/small", "./small"):
        (run / "config.yaml").write_text(CONFIG.replace("Qwen/Qwen2.5-0.5B-Instruct", base))
        card = ModelCard(card_of(find(str(run), None, ""), "a/b"))
        assert card.data.base_model is None and f"| Base model | {base} |" in card.text


def test_the_model_card_has_the_settings_of_each_step(run):
    def changed(step, was, now):
        return json.dumps({"step": step, "key": "data.train_batch_size", "was": was, "is": now}) + "\n"

    (run / "changes.jsonl").write_text(changed(2, 4, 8))  # resumed with batch size 8, and stopped before the first step
    assert "| Steps | 2 of 4 prompts |" in card_of(find(str(run), None, ""), "a/b")
    (run / "changes.jsonl").write_text(changed(1, 4, 16) + changed(2, 16, 8))
    assert "| Steps | 1 of 4 prompts, then 1 of 16 prompts |" in card_of(find(str(run), None, ""), "a/b")


def test_a_branch_is_created_and_an_existing_card_is_kept(run, hub, capsys):
    hub.repos["someone/my-model"] = {"main": {"README.md": b"by hand"}}
    assert rlfuse(["push", str(run / "global_step_2"), "someone/my-model", "--revision", "step-2"]) == 0
    branch = hub.repos["someone/my-model"]["step-2"]
    assert branch["README.md"] == b"by hand" and "model.safetensors" in branch
    assert hub.repos["someone/my-model"]["main"].keys() == {"README.md"}
    assert "kept the existing README.md" in capsys.readouterr().out


def test_a_dry_run_prints_files_and_card_without_requests(run, hub, capsys):
    assert rlfuse(["push", str(run), "someone/my-model", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "2 files" in printed and "model.safetensors" in printed and "# my-model" in printed and not hub.requests


def test_errors_of_push_are_reported_in_one_message(run, hub, capsys, monkeypatch):
    def message(*words):
        assert rlfuse(["push", *map(str, words)]) == 2
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return text

    cut = message(run / "global_step_4", "a/b")
    assert "the checkpoint is incomplete" in cut and "complete ones: global_step_2" in cut
    assert "the folder does not exist" in message(run / "nothing", "a/b")
    assert "use the form USER/NAME" in message(run, "a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "the hub refused (401)" in message(run, "a/b")
    hub.shutdown()
    hub.server_close()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert f"{hub.address} can't be reached" in message(run, "a/b")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "hf auth login" in message(run, "a/b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=1 is set" in message(run, "a/b")


def test_a_folder_without_a_run_has_a_short_card(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    card = ModelCard(card_of(find(str(tmp_path), None, ""), "someone/it"))
    assert card.data.base_model is None and "Uploaded with rlfuse" in card.text


def test_a_folder_receives_the_complete_model_once(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, target = run / "global_step_2" / "actor" / "huggingface", tmp_path / "exported" / "my-model"
    (model / "tokenizer.json").write_text("{}")
    (model / "templates").mkdir()
    (model / "templates" / "chat.jinja").write_text("{{ messages }}")
    assert rlfuse(["push", str(run), f"{target}/"]) == 0
    assert f"wrote  {target}\n" in capsys.readouterr().out
    copied = {path.relative_to(target): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    expected = {path.relative_to(model): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert copied.pop(Path("README.md")).decode().count("# my-model\n") == 1 and copied == expected
    assert [path.name for path in target.parent.iterdir()] == ["my-model"]
    for words, message in (
        ([str(target)], f"{target}: exists and is not an empty folder; give the path of a new folder"),
        ([str(tmp_path / "new"), "--private"], "--private: is for repositories of the hub"),
        ([str(model / "config.json" / "new")], f"{model / 'config.json' / 'new'}: can't be written"),
    ):
        assert rlfuse(["push", str(run), *words]) == 2
        assert message in capsys.readouterr().err
