"""Reward models with several labels or a custom class: config, errors, scores, pairs."""

import json
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rlfuse import notebook as nb
from rlfuse.config.reward_labels import head_labels, label_columns
from rlfuse.config.rewards import read_entries
from rlfuse.config.schema import DataConfig, ModelConfig
from rlfuse.data.preferences import dimension_labels, load_preferences
from rlfuse.engines.trainer.models import check_forward, load_reward_model
from rlfuse.errors import DataError, EngineError, FunctionError, RewardError
from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.models.classifier import Classifier
from rlfuse.run.offline.reward_model import rows_of
from rlfuse.tasks.vocabulary import build_tokenizer

RIGHT, BRIEF = "reward_model/right", "reward_model/brief"
CLASS = """\
import torch
from transformers import Qwen2ForSequenceClassification

class Bounded(Qwen2ForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.score = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        self.post_init()
"""
CUSTOM_FORWARD = """
    def forward(self, *inputs, **named):
        found = super().forward(*inputs, **named)
        found.logits = found.logits.tanh()
        return found
"""


def small(**more):
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2Config(**sizes, **heads, pad_token_id=0, initializer_range=0.5, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a random classifier with two labels and the tokenizer of the remainder task."""
    folder = tmp_path_factory.mktemp("two_labels")
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(small(id2label={0: "right", 1: "brief"})).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def folder_with_custom_class(folder, code):
    """Return a folder with weights and their custom class."""
    folder.mkdir()
    Qwen2ForSequenceClassification(small()).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForSequenceClassification": f"{folder.name}_code.Bounded"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / f"{folder.name}_code.py").write_text(code)
    return str(folder)


def test_labels_are_entries_with_weights():
    paths = ["reward_model:right", {"path": "reward_model:brief", "weight": 0.3, "normalise": True}]
    entries, functions = load_entries(paths, (), "some/model")
    assert [(entry.name, entry.weight) for entry in entries] == [(RIGHT, 1.0), (BRIEF, 0.3)]
    assert list(functions) == [RIGHT, BRIEF]
    assert all(entry.answer_only for entry in entries)
    for wrong, part in (
        (["reward_model:"], "names no label"),
        (["reward_model:a", "reward_model:a"], "reward_model:a is listed twice; remove one"),
        ([{"path": "reward_model:a", "name": "b"}], "name=b: the reward model is always named reward_model"),
        ([{"path": "reward_model:a", "kwargs": {"b": 1}}], "takes no arguments"),
    ):
        assert any(part in problem for problem in read_entries(wrong, (), "some/model")[1])
    assert "to its folder or hub name" in read_entries(["reward_model:a"])[1][0]


def test_unknown_labels_are_rejected_before_loading(model):
    assert head_labels(model) == ["right", "brief"] and label_columns("m", ["LABEL_0"], ["reward_model"]) == {
        "reward_model": 0
    }
    with pytest.raises(RewardError, match=r"2 labels.*reward.functions=\[reward_model:right, reward_model:brief\]"):
        Classifier(model)
    with pytest.raises(RewardError, match=r"reward_model:short: .* has no such label; it has right, brief"):
        Classifier(model, label="short")


def test_a_reward_model_without_embeddings_for_its_tokens_is_rejected(tmp_path):
    Qwen2ForSequenceClassification(small()).save_pretrained(tmp_path)
    build_tokenizer(tuple(f"w{number}" for number in range(30))).save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"reward\.model_path=.* has tokens up to 137 .* rows for 0 to 127\. Use the"):
        Classifier(str(tmp_path))


def test_labels_are_logits_of_one_forward_pass(model, monkeypatch):
    labels = {name: Classifier(model, label=name) for name in ("right", "brief")}
    for each in labels.values():
        each.start()
    loaded = labels["right"]._model
    assert labels["brief"]._model is loaded
    items = [item_of_row({"prompt": "20 mod 6 =", "response": text}) for text in ("20 - 6 = 14 ; 14", "; 2", "; 2")]
    passes, run = [], loaded._runner._forward
    monkeypatch.setattr(loaded._runner, "_forward", lambda batch: passes.append(len(batch)) or run(batch))
    found = {name: labels[name].score(items) for name in ("brief", "right", "brief")}
    assert sum(passes) == 2
    direct = Qwen2ForSequenceClassification.from_pretrained(model)
    for position, item in enumerate(items):
        logits = direct(torch.tensor([loaded._runner.encode(item, loaded._tokenizer).tokens])).logits[0].tolist()
        assert [found["right"][position], found["brief"][position]] == pytest.approx(logits, abs=1e-5)


def test_a_custom_head_pools_the_hidden_states(model, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "jobs/rewards.md").read_text()
    example = re.search(r"  ```python\n(  class MeanPooling.*?)  ```", page, re.DOTALL)[1]
    folder, bias = tmp_path / "model", torch.tensor([0.5, -0.5])
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.bias": bias}, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.chdir(tmp_path)
    more = "\nclass Scaled(MeanPooling):\n    def __init__(self, config, by): super().__init__(config); self.by = by\n"
    more += "    def forward(self, *given): return self.by * super().forward(*given)\n"
    more += "class Other(MeanPooling):\n    def __init__(self, c): super().__init__(c); self.gate = self.score\n"
    more += "class Flat(MeanPooling):\n    def forward(self, *given): return super().forward(*given)[:, 0]\n"
    Path("mine.py").write_text("import torch\n" + textwrap.dedent(example) + more)
    items = [item_of_row({"prompt": "20 mod 6 =", "response": text}) for text in ("20 - 6 = 14 ; 14", "; 2")]

    def scorer(head, path=str(folder), **kwargs):
        loaded = Classifier(path, label="brief", head=f"mine.py:{head}", head_kwargs=kwargs)
        loaded.start()
        return loaded

    pooled = scorer("MeanPooling")
    direct = Qwen2ForSequenceClassification.from_pretrained(folder)
    for item, score in zip(items, pooled.score(items), strict=True):
        tokens = torch.tensor([pooled._model._runner.encode(item, pooled._model._tokenizer).tokens])
        mean = direct.model(tokens).last_hidden_state.mean(1)
        assert score == pytest.approx((mean @ tensors["score.weight"].T + bias)[0, 1].item(), abs=1e-5)
    cache = tmp_path / "hub" / "models--org--name"
    shutil.copytree(folder, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    assert scorer("MeanPooling", "org/name").score(items) == pooled.score(items)
    assert scorer("Scaled", by=3.0).score(items) == pytest.approx([3 * each for each in pooled.score(items)], abs=1e-5)
    with pytest.raises(RewardError, match=r"of Other .*: gate.weight is missing.*outside the base model: score"):
        scorer("Other")
    assert "mine.py:Flat: returned a tensor [2]; return logits [2, 2]" in scorer("Flat").score(items)[0].message
    with pytest.raises(FunctionError, match=r"mine.py:Scaled raised TypeError: .*missing 1 required positional"):
        scorer("Scaled")
    with pytest.raises(RewardError, match=r"requires reward.model_backend=hf, got vllm"):
        Classifier(str(folder), "vllm", label="brief", head="mine.py:MeanPooling")


@pytest.mark.slow
def test_pairs_are_scored_by_the_label_of_their_dimension(model, tmp_path):
    question = "20 mod 6 ="
    rows = [
        {"prompt": question, "chosen": "20 - 6 = 14 ; 14", "rejected": "; 2", "dimension": "right"},
        {side: conversation(question, text) for side, text in (("chosen", "; 2"), ("rejected", "; 14"))},
    ]
    rows[1]["dimension"] = "brief"
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = nb.pairs(str(path))
    assert list(table["prompt"]) == [question] * 2 and list(table["chosen"]) == ["20 - 6 = 14 ; 14", "; 2"]
    found = nb.score_pairs(table, model_path=model)
    for number, (side, label) in enumerate((("chosen", "right"), ("rejected", "brief"))):
        alone = pd.DataFrame({"prompt": question, "response": [table[side][number]]})
        expected = nb.score(alone, [f"reward_model:{label}"], model_path=model)["reward"][0]
        assert found[f"{side}_reward"][number] == pytest.approx(expected)
    assert (
        np.allclose(found["gap"], found["chosen_reward"] - found["rejected_reward"]) and found["failure"].isna().all()
    )
    shorter = nb.score_pairs(table, lambda solution_str: -len(solution_str))
    assert list(shorter["gap"]) == [-13, 1]
    many = pd.concat([table.join(found)] * 9, ignore_index=True)
    assert nb.plot_length_bias(many).get_lines()[0].get_label() == "labels"
    assert "18 held-out pairs" in nb.plot_calibration(many["gap"]).get_title()
    for broken, message in (
        (table[["prompt"]], "no column messages, chosen, rejected; its columns are prompt"),
        (rows, "got a list; pass a pandas table"),
    ):
        with pytest.raises(ValueError, match=message):
            nb.score_pairs(broken, len)
    with pytest.raises(ValueError, match="no column gap"):
        nb.plot_length_bias(table)
    path.write_text(json.dumps({"chosen": "1 2", "rejected": "1 3"}) + "\n")
    with pytest.raises(
        DataError, match="line 1, field prompt: it is missing, so prompts and answers can't be separated"
    ):
        nb.pairs(str(path))


def test_rows_name_their_dimension(tmp_path):
    path, tokenizer = tmp_path / "pairs.jsonl", build_tokenizer()

    def load(*dimensions, labels=()):
        rows = [{"chosen": " 1", "rejected": " 2"} | ({"dimension": d} if d else {}) for d in dimensions]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_preferences([str(path)], tokenizer, DataConfig(train_files=[]), labels)[0]

    pairs = load("right", "brief", "right")
    assert dimension_labels(pairs) == ["right", "brief"] and dimension_labels(load(None)) == ["LABEL_0"]
    assert [row.tensors["label"][0] for row in rows_of(pairs, ["brief", "right"])] == [1, 1, 0, 0, 1, 1]
    for dimensions, labels, message in (
        (
            ["right", None],
            (),
            "line 2, field dimension: None, but the first row has right. Set it in all rows, or in none",
        ),
        ([3], (), "field dimension: 3; expected a non-empty string"),
        (["right"], ["brief", "clear"], "field dimension: 'right', but the model's labels are brief, clear"),
        ([None], ["brief", "clear"], "field dimension: None, but the model's labels are brief, clear"),
    ):
        with pytest.raises(DataError, match=message):
            load(*dimensions, labels=labels)


def test_a_custom_class_may_change_only_the_head(tmp_path):
    settings = ModelConfig(dtype="float32", trust_remote_code=True)
    sound = folder_with_custom_class(tmp_path / "sound", CLASS)
    with pytest.raises(RewardError, match=r"ships with a custom class.*trust_remote_code=true"):
        head_labels(sound)
    with pytest.raises(RewardError, match=r"^reward.model_path: .*trust_remote_code=true"):
        Classifier(sound)
    assert head_labels(sound, trust_remote_code=True) == ["LABEL_0", "LABEL_1"]
    check_forward(load_reward_model(sound, settings, ["right", "brief"]), sound)
    other = folder_with_custom_class(tmp_path / "other", CLASS + CUSTOM_FORWARD)
    with pytest.raises(EngineError, match=r"the forward of Bounded returns .*Compute scores in the head only"):
        check_forward(load_reward_model(other, settings, ["right", "brief"]), other)
    two = folder_with_custom_class(
        tmp_path / "two", CLASS.replace("self.post_init()", "self.more = torch.nn.Linear(2, 2)")
    )
    with pytest.raises(EngineError, match=r"has 2 modules \(Sequential, Linear\)"):
        load_reward_model(two, settings, ["right", "brief"])
    broken = folder_with_custom_class(
        tmp_path / "broken", CLASS.replace("class Bounded", "import absent_module\nclass Bounded")
    )
    with pytest.raises(RewardError, match=r"model.path: .*broken_code.Bounded can't be loaded: .*absent_module"):
        head_labels(broken, trust_remote_code=True)
