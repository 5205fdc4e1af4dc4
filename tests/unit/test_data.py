"""Real files in, prompts out; every kind of bad row is named."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlfuse.config.schema import DataConfig
from rlfuse.data.prompts import PromptSource, load_prompts
from rlfuse.data.rows import read_rows
from rlfuse.errors import DataError

VERL = {
    "data_source": "sums",
    "prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "1 2"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 7},
}
TRL = {"prompt": "1 2 3", "answer": "6", "level": 2}


@pytest.fixture(scope="module")
def tokenizer():
    words = {
        word: i for i, word in enumerate(["<unk>", "<eos>", "user:", "system:", "go", "add", *map(str, range(50))])
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")


def settings(**values):
    return DataConfig(train_files=[], **values)


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_format_gives_the_same_row(tmp_path):
    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([VERL]))
    jsonl(tmp_path / "a.jsonl", VERL)
    datasets.Dataset.from_list([VERL]).save_to_disk(tmp_path / "folder")
    rows = [read_rows(str(tmp_path / name), "prompt")[0] for name in ("a.parquet", "a.json", "a.jsonl", "folder")]
    assert all(row == rows[0] for row in rows)
    assert rows[0].ground_truth == "3" and rows[0].data_source == "sums"
    assert rows[0].columns["extra_info"] == {"split": "train", "index": 7}


def test_trl_row_keeps_its_columns_and_finds_its_answer(tmp_path, tokenizer):
    (prompt,), report = load_prompts([jsonl(tmp_path / "sums.jsonl", TRL)], tokenizer, settings())
    assert prompt.ground_truth == "6" and prompt.data_source == "sums" and prompt.columns["level"] == 2
    assert prompt.text == "1 2 3" and prompt.messages == ({"role": "user", "content": "1 2 3"},)
    assert prompt.token_ids.dtype == np.int32 and len(prompt.token_ids) == 3
    assert "1 prompts" in str(report)


def test_chat_template_is_applied_where_there_is_one(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", VERL)
    assert load_prompts([file], tokenizer, settings())[0][0].text == "add\n1 2"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
    )
    try:
        prompt = load_prompts([file], tokenizer, settings())[0][0]
    finally:
        tokenizer.chat_template = None
    assert prompt.text == "system: add user: 1 2 go"
    assert tokenizer.decode(prompt.token_ids) == prompt.text


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": ""}, ["line 2", "field prompt", "non-empty"]),
        ({"prompt": [{"content": "x"}]}, ["line 2", "prompt[0]", "role"]),
        ({"prompt": [{"role": "user", "content": 3}]}, ["line 2", "prompt[0]", "content"]),
        ({"question": "1"}, ["line 2", "field prompt", "None"]),
        ({"prompt": "1", "images": [3]}, ["line 2", "field images", "paths of files"]),
        ({"prompt": "1", "reward_model": "rule"}, ["line 2", "field reward_model", "ground_truth"]),
        ([1], ["line 2", "object", "list"]),
    ],
)
def test_bad_rows_are_named_by_file_row_and_field(tmp_path, row, words):
    with pytest.raises(DataError) as error:
        read_rows(jsonl(tmp_path / "bad.jsonl", TRL, row), "prompt")
    assert all(word in str(error.value) for word in ["bad.jsonl", *words]), str(error.value)


def test_unusable_files_say_what_to_do(tmp_path):
    for name, content, words in (
        ("none.jsonl", None, ["no file", "data.train_files"]),
        ("empty.jsonl", "", ["no rows"]),
        ("broken.jsonl", '{"prompt": "1"}\n{oops\n', ["line 2", "not JSON"]),
        ("broken.json", "[{}, {oops}]", ["line 1", "not JSON"]),
        ("deep.json", "[" * 100_000, ["deep.json: brackets are nested too deep"]),
        ("deep.jsonl", '{"prompt": ' + "[" * 100_000, ["line 1: brackets are nested too deep"]),
        ("text.csv", "a,b", [".csv", "parquet"]),
        ("broken.parquet", "no parquet", ["parquet"]),
        ("latin.jsonl", b'{"prompt": "caf\xe9"}', ["not UTF-8"]),
        ("columns.jsonl", '{"promt": "1"}\n', ["promt", "data.prompt_key=promt"]),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError) as error:
            read_rows(str(tmp_path / name), "prompt")
        assert all(word in str(error.value) for word in [name, *words]), str(error.value)


def test_overlong_prompts(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "1 2"}, {"prompt": " ".join(map(str, range(10, 17)))})
    load = lambda **values: load_prompts([file], tokenizer, settings(max_prompt_length=4, **values))  # noqa: E731
    with pytest.raises(DataError, match=r"row 1.*7 tokens.*max_prompt_length is 4.*filter_overlong.*truncation"):
        load()
    kept, report = load(filter_overlong_prompts=True)
    assert len(kept) == 1 and "1 dropped" in str(report)
    for way, words in (("left", "13 14 15 16"), ("right", "10 11 12 13"), ("middle", "10 11 15 16")):
        prompts, report = load(truncation=way)
        assert tokenizer.decode(prompts[1].token_ids) == words
        assert "1 cut" in str(report)
    with pytest.raises(DataError, match="no prompt is left"):
        load_prompts([file], tokenizer, settings(max_prompt_length=1, filter_overlong_prompts=True))


def test_order_is_deterministic_covers_an_epoch_and_resumes(tmp_path, tokenizer):
    file = jsonl(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(10)))
    prompts, _ = load_prompts([file], tokenizer, settings())

    def source(seed=1):
        return PromptSource(prompts, 3, shuffle=True, seed=seed)

    one, two = source(), source()
    batches = [[p.index for p in one.next_batch()] for _ in range(7)]
    assert batches == [[p.index for p in two.next_batch()] for _ in range(7)]
    assert one.steps_per_epoch == 3 and one.epoch == 2
    assert len({i for batch in batches[:3] for i in batch}) == 9
    assert batches[:3] != batches[3:6]
    resumed = source()
    resumed.load_state_dict({"taken": 5, "epoch": 1})
    assert [[p.index for p in resumed.next_batch()] for _ in range(2)] == batches[5:]
    assert [[p.index for p in source(2).next_batch()] for _ in range(3)] != batches[:3]
    plain = PromptSource(prompts, 3, shuffle=False, seed=1)
    assert [p.index for p in plain.next_batch()] == [0, 1, 2]
    with pytest.raises(DataError, match=r"train_batch_size=11.*10 prompts"):
        PromptSource(prompts, 11, True, 1)
