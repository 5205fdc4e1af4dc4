"""Custom samplers: order of batches, updates with rewards, resuming, and messages for invalid samplers."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from test_experience import groups

from rlfuse.config.custom_functions import clear_cache
from rlfuse.config.schema import DataConfig
from rlfuse.data.sampler import SamplerSource
from rlfuse.errors import ConfigError, DataError, FunctionError
from rlfuse.observe.custom_metrics import finished
from rlfuse.samples import Prompt

README = Path(__file__).resolve().parents[2] / "rlfuse/data/README.md"
PROMPTS = [Prompt(row, np.array([1], np.int32), "p", (), "s", None, {"level": row % 3}) for row in range(7)]
OTHERS = """
class Backwards:
    def __init__(self, data_source, data_config): self.rows = len(data_source)
    def set_epoch(self, epoch): self.epoch = epoch
    def __len__(self): return self.rows - 1
    def __iter__(self): return iter(range(self.rows - 1 - self.epoch, 0, -1))
class Once(Backwards):
    def __iter__(self): return iter([0])
class Twice(Backwards):
    def __iter__(self): return iter([1, 1])
class Outside(Backwards):
    def __iter__(self): return iter([7, 1])
class Fails(Backwards):
    def __iter__(self): yield 1 / 0
class Forgets(Backwards):
    def update(self, batch): ...
class Unsaved(Forgets):
    def state_dict(self): return {"rows": {1, 2}}
    def load_state_dict(self, state): ...
class Numbered(Unsaved):
    def state_dict(self): return {"rows": [{7: 0.5}]}
class Positioned(Backwards):
    at = 0
    def set_epoch(self, epoch): self.epoch = epoch; self.at = 0
    def __iter__(self):
        rows = [*super().__iter__()]
        while self.at < len(rows):
            self.at += 1
            yield rows[self.at - 1]
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Return the source of a class: the README's, or one of OTHERS."""
    monkeypatch.chdir(tmp_path)
    clear_cache()
    page = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    (tmp_path / "mine.py").write_text(page + OTHERS)

    def make(name, **kwargs):
        data = DataConfig(train_batch_size=2, sampler=f"mine.py:{name}", sampler_kwargs=kwargs)
        return SamplerSource(PROMPTS, data, partial(finished, prompt_key="prompt"))

    return make


def rows(source):
    return [prompt.index for prompt in source.next_batch()]


@pytest.mark.parametrize("name", ["Backwards", "Positioned"])
def test_an_epoch_follows_the_sampler_and_drops_an_incomplete_batch(source, name):
    drawn = source(name)
    assert drawn.steps_per_epoch == 3
    assert [rows(drawn) for _ in range(3)] == [[6, 5], [4, 3], [2, 1]]
    saved = drawn.state_dict()
    assert (rows(drawn), rows(drawn), drawn.epoch) == ([5, 4], [3, 2], 1)
    assert rows(drawn) == [4, 3] and drawn.epoch == 2, "the second epoch had 5 rows"
    resumed = source(name)
    resumed.load_state_dict(saved)
    assert rows(resumed) == [5, 4]
    resumed_again = source(name)
    resumed_again.load_state_dict(resumed.state_dict())
    assert [rows(resumed_again) for _ in range(2)] == [[3, 2], [4, 3]]


def test_the_curriculum_of_the_readme_gets_harder_with_rewards_and_resumes(source):
    drawn, easy = source("Curriculum", target=0.6), {0, 3, 6}
    for reward, levels in ((0.5, {0}), (0.7, {0, 1}), (0.9, {0, 1, 2})):
        drawn.update(groups([[reward, reward]], [[3, 2]]))
        found = {PROMPTS[row].columns["level"] for _ in range(20) for row in rows(drawn)}
        assert found == levels, (reward, easy)
        assert drawn.upcoming() == []
    resumed = source("Curriculum", target=0.6)
    resumed.load_state_dict(drawn.state_dict())
    assert [rows(resumed) for _ in range(9)] == [rows(drawn) for _ in range(9)]


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "message"),
    [
        ("Absent", {}, ConfigError, r"data.sampler=mine.py:Absent: the file has no class `Absent`; its classes: Curr"),
        ("Backwards", {"step": 1}, FunctionError, "raised TypeError: .*unexpected keyword argument 'step'"),
        ("Forgets", {}, ConfigError, "has `update` but not `state_dict` and `load_state_dict`"),
        ("Unsaved", {}, ConfigError, "`state_dict` must return JSON values .*set is not JSON serializable"),
        ("Numbered", {}, ConfigError, "`state_dict` must return JSON values .*key 7 is not a string"),
        ("Once", {}, DataError, "an epoch has fewer rows than data.train_batch_size=2"),
        ("Twice", {}, DataError, "yielded row 1 twice in a batch"),
        ("Outside", {}, DataError, "yielded 7; yield row numbers from 0 to 6"),
        ("Fails", {}, FunctionError, r"(?s)raised ZeroDivisionError.*mine.py\", line \d+, in __iter__"),
    ],
)
def test_errors_of_a_sampler_are_reported(source, name, kwargs, error, message):
    with pytest.raises(error, match=message):
        source(name, **kwargs).next_batch()


def test_the_key_is_checked_like_other_custom_classes():
    data = OmegaConf.structured(DataConfig)
    assert data.sampler is None and data.sampler_kwargs == {}
