"""Training state by parameter name: ranks of any layout read the state that ranks of any other layout wrote."""

from itertools import product
from math import prod

import pytest
import torch

from rlfuse.engines.trainer import state_files
from rlfuse.engines.trainer.saving import checkpoint_writer
from rlfuse.engines.trainer.state_files import MOMENTS, WEIGHT, WHOLE, Part, SavedState, Share
from rlfuse.errors import EngineError

SHAPES = {"a.weight": (4, 6), "b.weight": (6, 4), "norm": (5,), "model.embed_tokens.weight": (8, 2)}
FULL_TENSORS = {
    name: torch.arange(prod(shape)).float().view(shape) + 100 * i for i, (name, shape) in enumerate(SHAPES.items())
}
DIMS = {"a.weight": 0, "b.weight": 1}
"""Parameter -> dimension that tensor-parallel ranks shard."""


def layout(ranks, degree=1, by_parameter=False, owners=None):
    """Return the parts of each of `ranks * degree` ranks: `degree` shares, each flattened over `ranks`.

    `by_parameter`: each parameter is divided over the ranks, as under ZeRO 3; otherwise their concatenation is.
    """
    found = []
    for index, rank in product(range(degree), range(ranks)):
        parts, total = [], 0
        shards = {}
        for name, full in FULL_TENSORS.items():
            share = Share(index, degree, DIMS[name]) if name in DIMS and degree > 1 else WHOLE
            shards[name] = share, full.chunk(degree, DIMS[name])[index] if share != WHOLE else full
        size = -(-sum(tensor.numel() for _, tensor in shards.values()) // ranks)
        for name, (share, tensor) in shards.items():
            count = tensor.numel()
            each = -(-count // ranks)
            first, last = (
                (rank * each, (rank + 1) * each) if by_parameter else (rank * size - total, (rank + 1) * size - total)
            )
            first, last = max(0, first), min(count, last)
            total += count
            if first < last:
                flat = tensor.flatten()[first:last]
                fields = {WEIGHT: flat, **{key: flat + n for n, key in enumerate(MOMENTS, 1)}}
                parts.append(Part(name, tuple(tensor.shape), first, fields, share, steps=3))
        found.append(parts)
    return found  # fmt: skip


LAYOUTS = {
    "one rank": layout(1),
    "three ranks": layout(3),
    "three ranks, by parameter": layout(3, by_parameter=True),
    "two shares": layout(1, 2),
    "two shares of two ranks": layout(2, 2, by_parameter=True),
}


def write(folder, ranks):
    for rank, parts in enumerate(ranks):
        with checkpoint_writer() as files:
            state_files.save(folder, rank, parts, 7, files)
        assert files.problem is None
    return SavedState(folder)


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_layout_reads_the_state_of_every_other_layout(tmp_path, monkeypatch, before, after):
    opened, open_file = [], state_files.safe_open
    monkeypatch.setattr(state_files, "safe_open", lambda *each: opened.append(each) or open_file(*each))
    saved = write(tmp_path, LAYOUTS[before])
    assert saved.updates == 7 and {saved.steps(name) for name in SHAPES} == {3}
    for part in (part for parts in LAYOUTS[after] for part in parts):
        for field, tensor in part.tensors.items():
            torch.testing.assert_close(saved.read(field, part), tensor, rtol=0, atol=0)
    assert len(opened) == len(LAYOUTS[before]), "a file is opened once: its header lists all tensors"


def test_a_tied_head_reads_the_embedding_and_vocabulary_shards_read_their_rows(tmp_path):
    saved = write(tmp_path, LAYOUTS["three ranks"])
    embedding = FULL_TENSORS["model.embed_tokens.weight"]
    head = Part("lm_head.weight", (8, 2), 3, {WEIGHT: torch.empty(5)}, is_tied_copy=True)
    assert saved.read("exp_avg", head).tolist() == (embedding.flatten()[3:8] + 1).tolist()
    share = Part("lm_head.weight", (2, 2), 0, {WEIGHT: torch.empty(4)}, Share(3, 4))
    assert saved.read(WEIGHT, share).tolist() == embedding[6:].flatten().tolist()


def test_missing_state_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no state to resume from"):
        SavedState(tmp_path)
    saved = write(tmp_path, LAYOUTS["three ranks"][::2])
    with pytest.raises(FileNotFoundError, match=r"has only \d+ of \d+ values of weight/a.weight"):
        saved.read(WEIGHT, LAYOUTS["one rank"][0][0])
    with pytest.raises(FileNotFoundError, match=r"has no other. Use a checkpoint of the same model"):
        saved.steps("other")
    saved = write(tmp_path, LAYOUTS["three ranks"])
    wider = Part("a.weight", (5, 6), 0, {WEIGHT: torch.empty(30)})
    with pytest.raises(EngineError, match=r"has a.weight with shape \[4, 6\], this model's is \[5, 6\]"):
        saved.read(WEIGHT, wider)
