"""Memory of video models: trained towers, and embeddings for ranks and engines."""

from dataclasses import replace

import pytest
from test_plan import sizes
from test_plan_models import FAMILIES, job

from rlfuse.engines.memory.activations import worst_micro_batches
from rlfuse.engines.memory.estimate import GIB, Budget, memory_of
from rlfuse.engines.memory.model_sizes import read_shape


@pytest.fixture
def small(tmp_path):
    FAMILIES["qwen2"].save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_trained_tower_is_resident_twice(small):
    shape = replace(read_shape(small, "model.path"), tower=1000)
    config = job(actor__zero_stage=3, video__freeze_vision_tower=False)
    parts = sizes(memory_of(config, {"actor": shape}, Budget("cuda", 80 * GIB)), "tower")
    assert parts["trained copies"] == 1000 * (2 + 2 / 8 + 4) and parts["optimizer"] == 1000 * 12 / 8
    assert parts["encoders' parameters"] == 2000
    shape = replace(shape, sight=(32, 1280, 3420))
    at_work = sizes(memory_of(config, {"actor": shape}, Budget("cuda", 80 * GIB)), "tower")["activations"]
    assert 4 * GIB < at_work < 6 * GIB, "a unit of 640 tokens"


@pytest.mark.slow
def test_clip_embeddings_are_planned_for_all_layers_that_read_them(small):
    shape, config = read_shape(small, "model.path"), job(data__max_prompt_length=4096)
    plain, deepstack = (replace(shape, tower=1000, embedded=times * shape.hidden) for times in (1, 4))
    base, wide = (memory_of(config, {"actor": each}, Budget("cuda", 80 * GIB)) for each in (plain, deepstack))
    tokens = max(each.prompts for each in worst_micro_batches(config, linear=False))
    assert tokens >= 4096 and sizes(base, "actor")["visual embeddings"] == tokens * 2 * shape.hidden
    assert sizes(wide, "actor")["visual embeddings"] == 2 * tokens * 2 * 4 * shape.hidden, "two copies"
    assert sizes(wide, "engine")["work space"] - sizes(base, "engine")["work space"] >= 6 * 4096 * shape.hidden * 2
