"""Loading of prompts from data files; every kind of invalid row is reported by file, row and field."""

import json
import re
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from rlfuse.config.schema import DataConfig, ModelConfig
from rlfuse.data import prompts
from rlfuse.data.prompts import PromptSource, load_prompts
from rlfuse.data.rows import DataRow, read_rows
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.errors import ConfigError, DataError, UserError

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


def test_every_file_format_gives_the_same_row(tmp_path):
    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([VERL]))
    jsonl(tmp_path / "a.jsonl", VERL)
    datasets.Dataset.from_list([VERL]).save_to_disk(tmp_path / "folder")
    rows = [read_rows(str(tmp_path / name), "prompt")[0] for name in ("a.parquet", "a.json", "a.jsonl", "folder")]
    assert all(row == rows[0] for row in rows)
    assert rows[0].ground_truth == "3" and rows[0].data_source == "sums"
    assert rows[0].columns["extra_info"] == {"split": "train", "index": 7}


def test_a_trl_row_keeps_its_columns_and_its_answer(tmp_path, tokenizer):
    (prompt,), report = load_prompts([jsonl(tmp_path / "sums.jsonl", TRL)], tokenizer, settings())
    assert prompt.ground_truth == "6" and prompt.data_source == "sums" and prompt.columns["level"] == 2
    assert prompt.text == "1 2 3" and prompt.messages == ({"role": "user", "content": "1 2 3"},)
    assert prompt.token_ids.dtype == np.int32 and len(prompt.token_ids) == 3
    assert "1 prompts" in str(report)


def test_a_chat_template_is_applied_if_there_is_one(tmp_path, tokenizer):
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
        ({"prompt": "1", "images": [3]}, ["line 2", "field images", "a file path or bytes"]),
        ({"prompt": "1", "reward_model": "rule"}, ["line 2", "field reward_model", "ground_truth"]),
        ([1], ["line 2", "object", "list"]),
    ],
)
def test_invalid_rows_are_reported_by_file_row_and_field(tmp_path, row, words):
    with pytest.raises(DataError) as error:
        read_rows(jsonl(tmp_path / "bad.jsonl", TRL, row), "prompt")
    assert all(word in str(error.value) for word in ["bad.jsonl", *words]), str(error.value)


def test_unusable_files_are_reported_with_a_remedy(tmp_path):
    for name, content, words in (
        ("none.jsonl", None, ["does not exist", "data.train_files"]),
        ("empty.jsonl", "", ["no rows"]),
        ("broken.jsonl", '{"prompt": "1"}\n{oops\n', ["line 2", "not JSON"]),
        ("broken.json", "[{}, {oops}]", ["line 1", "not JSON"]),
        ("deep.json", "[" * 100_000, ["deep.json: brackets are nested too deep"]),
        ("deep.jsonl", '{"prompt": ' + "[" * 100_000, ["line 1: brackets are nested too deep"]),
        ("text.txt", "a,b", [".txt", "parquet"]),
        ("empty.csv", "", ["no rows"]),
        ("header.csv", "prompt,answer\n", ["no rows"]),
        ("short.csv", "prompt,answer\n1,2\n3\n", ["line 3: 1 cells, but the header has 2 distinct columns"]),
        ("long.csv", "prompt\n1,2\n", ["line 2: 2 cells", "quote cells"]),
        ("twice.csv", "prompt,prompt\n1,2\n", ["line 2: 2 cells, but the header has 1 distinct columns"]),
        ("quote.csv", 'prompt\n"1\n', ["not CSV"]),
        ("utf16.csv", "prompt\n1\n".encode("utf-16"), ["byte 0: not UTF-8"]),
        ("broken.parquet", "no parquet", ["parquet"]),
        ("latin.jsonl", b'{"prompt": "caf\xe9"}', ["not UTF-8"]),
        ("columns.jsonl", '{"promt": "1"}\n', ["promt", "data.prompt_key=promt"]),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError) as error:
            read_rows(str(tmp_path / name), "prompt")
        assert all(word in str(error.value) for word in [name, *words]), str(error.value)


CHAT = [{"role": "user", "content": "1 2"}]
COLUMNS = [
    ({"answer": "3", "messages": CHAT}, "prompt", "messages"),
    ({"messages": CHAT, "prompts": "1"}, "prompt", "prompts"),
    ({"answer": "3", "question": "1"}, "prompt", "question"),
    ({"a_level": 2, "Question": "1"}, "prompt", "Question"),
    ({"aim": "x", "problem": "1", "solution": "3"}, "prompt", "problem"),
    ({"instruction": "1", "input": "", "output": "3"}, "prompt", "instruction"),
    ({"input": "1", "output": "3"}, "prompt", "input"),
    ({"answer": "3", "query": "1"}, "prompt", "query"),
    ({"answer": "3", "dialogue": CHAT}, "prompt", "dialogue"),
    ({"chosen": CHAT, "turns": CHAT}, "prompt", "turns"),
    ({"answer": "3", "conversation": CHAT}, "prompt", "conversation"),
    ({"answer": "3", "PROMPT": "1"}, "prompt", "PROMPT"),
    ({"answer": "3", "prompt": "1"}, "promt", "prompt"),
    ({"answer": "3", "prompt": "1"}, "content", "prompt"),
    ({"questions": "1", "prompt": "2"}, "question", "questions"),
    ({"prompt": 3, "text": "1"}, "text_", "text"),
    ({"answer": "3", "prompt_text": "1", "messages": CHAT}, "prompt_txt", "prompt_text"),
    ({"answer": "3", "level": 2}, "prompt", None),
    ({"chosen": CHAT, "rejected": CHAT}, "prompt", None),
    ({"ground_truth": "3", "images": ["a.png"]}, "prompt", None),
    ({"conversations": [{"from": "human", "value": "1"}], "id": "7"}, "prompt", None),
    ({"messages": None, "answer": "3"}, "prompt", None),
]


@pytest.mark.parametrize(("row", "wanted", "advised"), COLUMNS, ids=[str([*row]) for row, *_ in COLUMNS])
def test_a_missing_column_is_reported_with_a_column_that_has_prompts(tmp_path, row, wanted, advised):
    file = jsonl(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as error:
        read_rows(file, wanted)
    assert f"its columns are {', '.join(sorted(row))}" in str(error.value)
    if advised is None:
        assert str(error.value).endswith("Set data.prompt_key to the column with the prompts.")
    else:
        assert str(error.value).endswith(f"Set data.prompt_key={advised}.")
        assert len(read_rows(file, advised)) == 1, "the suggested column can be read"


@pytest.mark.parametrize(("text", "added"), [("1 2", True), ("<eos> 1 2", False)])
@pytest.mark.parametrize("adds", [True, False])
def test_prompts_with_clips_start_like_text_prompts(tokenizer, text, added, adds):
    """Add a BOS token if the tokenizer does, without a chat template."""
    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if adds:
        inner.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    starting = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<eos>")
    parts = SimpleNamespace(assemble=lambda row, text: (starting(text, add_special_tokens=False)["input_ids"], [], []))
    row = DataRow([{"role": "user", "content": text}], "x", "3", {}, is_chat=False)
    ids, shown = (prompts._assembled(row, starting, DataConfig(), "row 1", clips)[1] for clips in (None, parts))
    assert list(ids) == shown and (ids[0] == 1) == (adds or not added)


BEYOND = [
    (56, [], {}, None),
    (57, [], {}, None),
    (55, [], {}, "55 ('49')"),
    (1, [], {}, "55 ('49')"),
    (56, ["<new>"], {}, "56 ('<new>')"),
    (57, ["<new>"], {}, None),
    (57, ["<a>", "<b>"], {}, "57 ('<b>')"),
    (56, [], {"pad_token": "<pad>"}, "56 ('<pad>')"),
    (56, [], {"bos_token": "<bos>"}, "56 ('<bos>')"),
    (57, [], {"pad_token": "<pad>"}, None),
    (56, [], {"additional_special_tokens": ["<tool>"]}, "56 ('<tool>')"),
    (56, [], {"extra_special_tokens": {"image_token": "<image>"}}, None),
    (56, ["<new>"], {"extra_special_tokens": {"image_token": "<image>"}}, "('<new>')"),
]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model.path", "critic.path"])
@pytest.mark.parametrize(("rows", "added", "special", "last"), BEYOND, ids=str)
def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(
    tmp_path, tokenizer, rows, added, special, last, key
):
    for path, count in ((tmp_path / "model", 99 if key != "model.path" else rows), (tmp_path / "critic", rows)):
        LlamaConfig(vocab_size=count).save_pretrained(path)
    wide = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), **special)
    wide.add_tokens(added)
    wide.save_pretrained(tmp_path / "model")
    model, others = ModelConfig(path=str(tmp_path / "model")), {"ref.path": None}
    others |= {} if key == "model.path" else {key: str(tmp_path / "critic")}
    if last is None:
        assert load_tokenizer(model, others).get_vocab() == wide.get_vocab()
        return
    with pytest.raises(ConfigError) as error:
        load_tokenizer(model, others)
    [problem] = error.value.problems
    assert problem.startswith(f"{key}={tmp_path}") and last in problem and f"rows for 0 to {rows - 1}" in problem
    assert "resize_token_embeddings" in problem


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda words: [*words, "<more>"], None),
        (lambda words: [*words[:6], *words[7:], words[6]], "in 50 of 56 tokens; '0' has id 6 there and has id 55 here"),
        (lambda words: words[:-1], "in 1 of 56 tokens; '49' has id 55 there and does not exist here"),
    ],
)
def test_a_reference_with_another_vocabulary_is_refused(tmp_path, tokenizer, change, problem):
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    for name, listed in (("model", words), ("teacher", change(words))):
        inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(listed)}, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(tmp_path / name)
        LlamaConfig(vocab_size=99).save_pretrained(tmp_path / name)
    model, others = ModelConfig(path=str(tmp_path / "model")), {"ref.path": str(tmp_path / "teacher")}
    if problem is None:
        load_tokenizer(model, others)
        return
    with pytest.raises(ConfigError) as error:
        load_tokenizer(model, others)
    [found] = error.value.problems
    assert found.startswith(f"ref.path={tmp_path}/teacher: its vocabulary differs") and problem in found
    assert f"model.path={tmp_path}/model" in found


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
        assert "1 truncated" in str(report)
    with pytest.raises(DataError, match=r"none of 2 rows is usable: 2 are longer than data\.max_prompt_length=1"):
        load_prompts([file], tokenizer, settings(max_prompt_length=1, filter_overlong_prompts=True))


def test_the_order_is_deterministic_covers_an_epoch_and_resumes(tmp_path, tokenizer):
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


TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}{% endif %}"
    "{{ m.role }}:{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% endif %} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}go{% endif %}"
)
USER = {"role": "user", "content": "1 2"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


TEXTS = [
    ({"prompt": "1 2"}, {}, "user: 1 2\ngo"),
    ({"prompt": "1 2"}, {"prompt_is_chat": False}, "1 2"),
    ({"prompt": [USER]}, {"prompt_is_chat": False}, "user: 1 2\ngo"),
    ({"prompt": json.dumps([USER])}, {}, "user: 1 2\ngo"),
    ({"prompt": json.dumps(json.dumps([USER]))}, {}, "user: 1 2\ngo"),
    ({"prompt": f" [ {json.dumps(USER)} ]\n"}, {}, "user: 1 2\ngo"),
    ({"prompt": json.dumps(USER)}, {}, "user: 1 2\ngo"),
    ({"prompt": [json.dumps(USER)]}, {}, "user: 1 2\ngo"),
    ({"prompt": json.dumps([USER])}, {"prompt_is_chat": False}, json.dumps([USER])),
    ({"prompt": '[{"role": "user", "content": "1"}] sort'}, {}, 'user: [{"role": "user", "content": "1"}] sort\ngo'),
    ({"prompt": '{"role": "admin"} sort'}, {}, 'user: {"role": "admin"} sort\ngo'),
    ({"prompt": "[1, 2]"}, {}, "user: [1, 2]\ngo"),
    ({"prompt": [USER, {"role": "assistant", "content": "3"}]}, {}, "user: 1 2\nassistant: 3"),
    ({"prompt": [USER, {"role": "assistant", "content": "3 "}]}, {}, "user: 1 2\nassistant: 3 "),
    ({"prompt": json.dumps([{"name": "a"} | USER])}, {}, "user: 1 2\ngo"),
    ({"prompt": [USER | {"content": json.dumps([{"type": "text", "text": "1 <image>"}])}]}, {}, "user: 1 <image>\ngo"),
    ({"prompt": '{"type": 3}'}, {}, 'user: {"type": 3}\ngo'),
    ({"prompt": '{"id": 3, "role": oops'}, {}, 'user: {"id": 3, "role": oops\ngo'),
    ({"prompt": "1 2", "tools": [TOOL]}, {}, f"[{json.dumps([TOOL])}]user: 1 2\ngo"),
    ({"prompt": "1 2", "tools": json.dumps([TOOL])}, {}, f"[{json.dumps([TOOL])}]user: 1 2\ngo"),
    ({"prompt": "1 2", "tools": [json.dumps(TOOL)]}, {}, f"[{json.dumps([TOOL])}]user: 1 2\ngo"),
    ({"prompt": "1 2", "tools": json.dumps(TOOL)}, {}, f"[{json.dumps([TOOL])}]user: 1 2\ngo"),
    ({"prompt": "1 2", "tools": []}, {}, "user: 1 2\ngo"),
    ({"prompt": "1 2", "tools": None}, {}, "user: 1 2\ngo"),
    ({"prompt": "1 2"}, {"apply_chat_template_kwargs": {"enable_thinking": False}}, "<False>user: 1 2\ngo"),
    (
        {"prompt": [USER, CALL, {"role": "tool", "content": "3"}]},
        {},
        'user: 1 2\nassistant:{"name": "add", "arguments": {"a": 1}} \ntool: 3\ngo',
    ),
    ({"prompt": "what is <video> ?"}, {}, "user: what is <video> ?\ngo"),
    ({"prompt": "an <image> tag", "images": [], "videos": None}, {}, "user: an <image> tag\ngo"),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "<image>"}]}]}, {}, "user: <image>\ngo"),
    ({"prompt": "1", "tools": [{"name": "<image>"}]}, {}, '[[{"name": "<image>"}]]user: 1\ngo'),
]


@pytest.mark.parametrize(("row", "values", "text"), TEXTS)
def test_prompts_are_rendered_by_the_chat_template(tmp_path, chat_tokenizer, row, values, text):
    [prompt], _ = load_prompts([jsonl(tmp_path / "a.jsonl", row)], chat_tokenizer, settings(**values))
    assert prompt.text == text
    given = prompt.columns["prompt"]
    assert isinstance(given, str) or tuple(given) == prompt.messages, "rewards have the same columns as the template"
    assert "\ufdd0" not in json.dumps([prompt.messages, prompt.text], ensure_ascii=False)


def test_nulls_in_nested_columns_are_removed_before_the_template(tmp_path, chat_tokenizer):
    rows = [
        {"prompt": [USER, CALL, {"role": "tool", "content": "3", "name": "add"}], "tools": [TOOL | {"strict": True}]},
        {"prompt": [USER, {"role": "assistant", "content": "3"}], "tools": [TOOL]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    for name in ("a.parquet", "folder"):
        _, prompt = load_prompts([str(tmp_path / name)], chat_tokenizer, settings())[0]
        assert (
            prompt.text == f"[{json.dumps([TOOL])}]user: 1 2\nassistant: 3" and [*prompt.messages] == rows[1]["prompt"]
        )


@pytest.mark.parametrize(
    ("row", "values", "words"),
    [
        ({"prompt": "[{'role': 'user', 'content': '1'}]"}, {}, ["field prompt", "not JSON", "prompt_is_chat=false"]),
        ({"prompt": '[{"role": "user", "content": "1"'}, {}, ["field prompt", "not JSON"]),
        ({"prompt": f"{json.dumps(USER)}\n{json.dumps(USER)}"}, {}, ["field prompt", "text follows the first"]),
        ({"prompt": '[{"role":' + "[" * 100_000}, {}, ["field prompt", "not JSON", "recursion"]),
        ({"prompt": [USER, {"role": "assistant", "content": " "}]}, {}, ["field prompt", "can't be continued"]),
        ({"prompt": [json.dumps(USER), "x"]}, {}, ["field prompt[1]", "role and content"]),
        ({"prompt": [USER, CALL]}, {}, ["field prompt", "tool_calls", "can't be continued"]),
        ({"prompt": [USER, {"role": "system", "content": "1"}]}, {}, ["field prompt", "TemplateError", "late system"]),
        ({"prompt": [USER | {"content": [{"type": "audio", "audio": "a"}]}]}, {}, ["field prompt[0]", "audio"]),
        ({"prompt": [USER | {"content": [{"type": "text", "content": "a"}]}]}, {}, ["field prompt[0]", "content"]),
        ({"prompt": "a \ud800"}, {}, ["field prompt", "lone surrogate", "U+D800"]),
        ({"prompt": json.dumps([USER | {"content": "\udc00"}])}, {}, ["field prompt", "lone surrogate", "U+DC00"]),
        ({"prompt": "1", "answer": {"a": ["\ud83d"]}}, {}, ["field answer", "lone surrogate"]),
        ({"prompt": "1", "tools": '[{"name": "\\ud800"}]'}, {}, ["field tools", "lone surrogate"]),
        ({"prompt": " "}, {"prompt_is_chat": False}, ["field prompt", "has no tokens"]),
        ({"prompt": ""}, {"prompt_is_chat": False}, ["field prompt", "non-empty"]),
        ({"prompt": "1", "tools": "a hammer"}, {}, ["field tools", "JSON schemas", "Rename"]),
        ({"prompt": "1", "tools": {"add": {}}}, {}, ["field tools", "JSON schemas"]),
        ({"prompt": "1", "tools": [TOOL]}, {"prompt_is_chat": False}, ["field tools", "prompt_is_chat=false"]),
        ({"prompt": "1", "tools": [3]}, {}, ["field tools", "JSON schemas"]),
        ({"prompt": [USER | {"content": [{"type": "image"}]}]}, {}, ["images", "text-only model"]),
        ({"prompt": [USER | {"content": [{"type": "video_url"}]}]}, {}, ["videos", "text-only model"]),
        ({"prompt": "<image>", "images": ["a.png"]}, {}, ["images", "text-only model"]),
    ],
)
def test_rows_without_a_valid_prompt_are_reported_by_file_row_and_field(tmp_path, chat_tokenizer, row, values, words):
    with pytest.raises(DataError) as error:
        load_prompts([jsonl(tmp_path / "bad.jsonl", TRL, row)], chat_tokenizer, settings(**values))
    assert all(word in str(error.value) for word in ["bad.jsonl", *words]), str(error.value)
    assert re.search("row 1|line 2", str(error.value))


@pytest.mark.parametrize(
    ("template", "row", "given", "words"),
    [
        (TEMPLATE, TRL, {"enable_thinkin": True}, ["enable_thinkin=true", "does not use"]),
        (TEMPLATE, TRL, {"tools": []}, ["tools=[]", "is set by rlfuse"]),
        (None, TRL, {"enable_thinking": True}, ["no chat template"]),
        (None, TRL | {"tools": [TOOL]}, {}, ["row 0, field tools", "no chat template"]),
        ("{{ messages }}", TRL | {"tools": [TOOL]}, {}, ["row 0, field tools", "does not use"]),
    ],
    ids=["misspelt", "not a variable", "no template", "tools without template", "tools not read"],
)
def test_values_that_the_chat_template_ignores_are_refused(tmp_path, chat_tokenizer, template, row, given, words):
    chat_tokenizer.chat_template = template
    with pytest.raises(UserError) as error:
        load_prompts([jsonl(tmp_path / "a.jsonl", row)], chat_tokenizer, settings(apply_chat_template_kwargs=given))
    assert all(word in str(error.value) for word in words), str(error.value)
