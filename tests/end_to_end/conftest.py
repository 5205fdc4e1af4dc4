"""Session-wide fixtures of the tests that run real engines: one Ray cluster, tiny models, job and rank processes."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import ray
from driven_job import driver

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.run import WORKER_IMPORTS

SHARED = ("driven", "four", "four_whole")
"""Fixtures shared by several files, because their setup takes longer than a file's tests."""
LONGEST = ("driven", "test_several_nodes", "four", "test_notebooks", "test_training", "four_whole", "test_submit")
LONGEST += ("test_wheel", "test_rollout", "test_reward_pool", "test_trained_tower", "test_seeing_judge")
"""Groups ordered by duration: the longest start first, so that pytest workers finish at about the same time."""
DRIVEN = ("test_video_job", "test_still_images", "test_own_family", "test_quantized_rollout", "test_wide_engine")
DRIVEN += ("test_interruptions", "test_faults", "test_job", "test_slots", "test_own_log_probs", "test_job_rewards")
DRIVEN += ("test_filled_bubbles", "test_fusion_policies")
"""Files that use `driven`, ordered so that most jobs reuse the engines and ranks of the previous job: custom models
first, then deterministic ranks; last the file that stops all engines, because another backend needs their slots."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the markers
def pytest_collection_modifyitems(items):
    """Run all tests of a file in one pytest worker, as well as all files that use the same fixture of `SHARED`."""
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    sharing = {item.path: name for item in own for name in SHARED if name in item.fixturenames}
    group = {item: sharing.get(item.path, item.path.stem) for item in own}
    for item, name in group.items():
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: (place(group.get(item), LONGEST), place(item.path.stem, DRIVEN)))


def place(name, names):
    """Return the index of `name` in `names`, or their number if it is missing."""
    return names.index(name) if name in names else len(names)


@pytest.fixture(scope="session")
def slots():
    """Start a Ray cluster for the whole session and reserve two slots."""
    config = Config()
    config.trainer.n_gpus_per_node, config.cluster.device = 2, "cpu"
    yield asyncio.run(placement.start(config, WORKER_IMPORTS))
    placement.stop()


@pytest.fixture(scope="session")
def ray_cluster(slots):
    """Start Ray."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Save a random Qwen2 whose response differs for every prompt, with a tokenizer of 200 words."""
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    # AutoTokenizer loads Qwen2Tokenizer for a Qwen2 model regardless of the saved class.
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = Qwen2Tokenizer(vocab=special, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_tokens([AddedToken(f"w{i}", lstrip=True, normalized=False) for i in range(3, 200)])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=200,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ending_model(tiny_model, tmp_path_factory) -> Path:
    """Copy `tiny_model` with three EOS tokens: its responses are a third as long on average, and lengths vary.

    transformers loads these generation settings but refuses to save them.
    """
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "ending")
    refused = {"temperature": 0.6, "num_beams": 1, "length_penalty": 0.8}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, 6], **refused}))
    return folder


@pytest.fixture(scope="session")
def driven(ending_model, tmp_path_factory):
    """Yield the function that runs jobs one after the other in a process, see `driven_job.driver`."""
    with driver(ending_model, tmp_path_factory.mktemp("driven") / "log") as drive:
        yield drive


@pytest.fixture(scope="session")
def pipeline_models(tmp_path_factory):
    """Write the models of `single_process.write_models`."""
    from single_process import write_models

    return write_models(tmp_path_factory.mktemp("pipeline_models"))


@pytest.fixture(scope="session")
async def four(pipeline_models, slots):
    """Start four pipeline ranks that can load one layout after the other."""
    from probing import TWO_CRITICS, started_group

    async for group in started_group(pipeline_models, 4, TWO_CRITICS):
        yield group


@pytest.fixture(scope="session")
async def four_whole(slots):
    """Start four trainer ranks that can load one configuration after the other (`Probe.of`)."""
    from pipelines import Anywhere
    from trainer_probe import settings

    from rlfuse.engines.trainer.rank_group import start_ranks
    from rlfuse.engines.trainer.trainer_rank import TrainerRank

    ranks = await start_ranks(TrainerRank, settings(""), Anywhere(slots.group, 4, "cpu"), None)
    yield ranks
    for rank in ranks:
        ray.kill(rank)
