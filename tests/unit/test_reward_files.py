"""Reward files as modules: one module per file and process, importable by name in any process."""

import pickle
import sys
import time

import pytest
from scored_rows import score_table

from rlfuse.config import custom_modules
from rlfuse.errors import RewardError
from rlfuse.rewards.api.entries import load_entries
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import item_of_row

COUNTED = """
import dataclasses, multiprocessing, pickle, sys

runs = sys.__dict__.setdefault("_runs_of_{stem}", [])
runs.append(__name__)
seen = []

@dataclasses.dataclass
class Answer:
    text: str

def measure(answer):
    return len(answer.text)

def first(solution_str):
    seen.append(solution_str)
    return len(seen)

def second(solution_str):
    return measure(pickle.loads(pickle.dumps(Answer(solution_str)))) + 10 * len(seen)

def by_process(solution_str, method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(measure, [Answer(solution_str)])[0]
"""


def write_file(folder, stem, code=COUNTED):
    folder.mkdir(exist_ok=True)
    path = folder / f"{stem}.py"
    path.write_text(code.replace("{stem}", stem))
    return path


def value(spec, response="abc", **kwargs):
    [score] = load_function(spec, kwargs).score([item_of_row({"prompt": "p", "response": response})])
    return score.value


def test_all_entries_of_a_file_are_one_module(tmp_path):
    path = write_file(tmp_path, "rewards_of_one_file")
    [row] = score_table([f"{path}:first", f"{path}:second"], [{"prompt": "p", "response": "abc"}])
    assert (row["first"], row["second"]) == (1.0, 13.0)
    assert value(f"{path}:first") == 2.0  # loaded again, in the next cell of a notebook
    assert sys._runs_of_rewards_of_one_file == ["rewards_of_one_file"]


def test_files_with_equal_names_are_separate_modules(tmp_path):
    # The other module may be a reward, an installed package or the standard library.
    same = [write_file(tmp_path / folder, "rewards_of_one_name") for folder in ("one", "two")]
    others = [write_file(tmp_path / "one", stem) for stem in ("pytest", "code", "my-rewards.v2")]
    for path in (*same, *others):
        assert value(f"{path}:first") == 1.0 and value(f"{path}:second") == 13.0
    entries, functions = load_entries([f"{path}:first" for path in same])
    assert [entry.name for entry in entries] == ["rewards_of_one_name.first", "rewards_of_one_name.first_2"]
    modules = [function.call.__module__ for function in functions.values()]
    assert modules[0] == "rewards_of_one_name" and modules[1].startswith(
        "rlfuse.config.custom_modules.rewards_of_one_name_"
    )
    assert sys.modules["pytest"] is pytest
    for path in others:
        function = load_function(f"{path}:first").call
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("stem", ["rewards_with_processes", "pytest"])
def test_a_reward_may_use_processes(tmp_path, stem, method):
    path = write_file(tmp_path / method, stem)
    load_entries([{"path": f"{path}:first"}, {"path": f"{path}:second"}])
    assert value(f"{path}:by_process", method=method) == 3.0


def test_a_file_that_another_reward_imports_is_the_same_module(tmp_path):
    helper = write_file(tmp_path, "imported_by_a_reward")
    code = "import imported_by_a_reward\ndef f(solution_str): return imported_by_a_reward.first(solution_str)\n"
    importing = write_file(tmp_path, "importing_a_reward", code)
    for spec in (f"{importing}:f", f"{helper}:first", f"{importing}:f"):
        value(spec)
    assert value(f"{helper}:first") == 4.0 and len(sys._runs_of_imported_by_a_reward) == 1


def test_an_edited_file_is_reloaded_and_a_broken_edit_keeps_the_old_module(tmp_path):
    path = write_file(tmp_path, "rewards_to_edit", "def f(solution_str): return 1\n")
    before = load_function(f"{path}:f")
    path.write_text("def f(solution_str): return 2\n")
    assert value(f"{path}:f") == 2.0 and value(before) == 1.0
    path.write_text("def f(solution_str: return 3\n")
    with pytest.raises(RewardError, match=r"rewards_to_edit\.py, line 1"):
        load_function(f"{path}:f")
    assert sys.modules["rewards_to_edit"].f("") == 2
    path.write_text("def f(solution_str): return 2\n")
    assert value(f"{path}:f") == 2.0


def test_an_imported_module_may_be_deleted(tmp_path):
    path = write_file(tmp_path, "writes_a_neighbour")
    gone = "pathlib.Path(__file__).with_name('gone_neighbour.py')"
    path.write_text(
        f"import pathlib\n{gone}.write_text('N = 3')\nimport gone_neighbour\n{gone}.unlink()\n"
        "def f(solution_str): return gone_neighbour.N\n"
    )
    assert value(f"{path}:f") == 3.0


def test_modules_imported_by_the_notebook_are_reloaded_only_after_edits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = write_file(tmp_path, "imported_before")
    import imported_before

    monkeypatch.setattr(custom_modules, "_started", time.time() + 60)  # older than this process
    assert value(f"{path}:first") == 1.0 and imported_before.seen == ["abc"]
    path.write_text("def f(solution_str): return 2\n")
    assert value(f"{path}:f") == 2.0

    path = write_file(tmp_path, "imported_and_edited", "def f(solution_str): return 1\n")
    import imported_and_edited

    path.write_text("def f(solution_str): return 2\n")
    monkeypatch.undo()
    assert value(f"{path}:f") == 2.0 and imported_and_edited.f("") == 1
