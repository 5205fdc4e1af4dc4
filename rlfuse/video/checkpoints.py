"""Merge a trained text model back into the checkpoint of its video model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from rlfuse.config.model_files import WEIGHTS


def join_checkpoint(text_folder: str | Path, whole_folder: str | Path, out: str | Path) -> Path:
    """Write the model at `whole_folder` with the trained text part's tensors to `out`; return `out`.

    Raises ValueError before writing if the tensors do not match.
    """
    text_folder, whole_folder, out = Path(text_folder), Path(whole_folder), Path(out)
    trained = {_bare(name): (file, name) for name, file in locate_tensors(text_folder).items()}
    if (tied := AutoConfig.from_pretrained(whole_folder).tie_word_embeddings) and _EMBEDDING in trained:
        trained[_HEAD] = trained[_EMBEDDING]
    places = locate_tensors(whole_folder)
    sources = {name: trained.get(_bare(name), (file, name)) for name, file in places.items()}
    own = {_bare(name) for name in places}
    missing = sorted(name for name in own - trained.keys() if name.startswith(_TEXT))
    extra = sorted(trained.keys() - own - ({_HEAD} if tied else set()))
    wrong = [name for name, source in sources.items() if tensor_shape(*source) != tensor_shape(places[name], name)]
    if missing or extra or wrong:
        raise ValueError(
            f"{text_folder} is not the text part of {whole_folder}: missing {missing[:3]}, unknown {extra[:3]}, "
            f"different shape {wrong[:3]}. Pass the model that the training started from."
        )
    out.mkdir(parents=True)
    for shard in sorted(set(places.values())):
        names = [name for name, file in places.items() if file == shard]
        save_file({name: read_tensor(*sources[name]) for name in names}, out / shard.name, {"format": "pt"})
    for file in whole_folder.iterdir():
        if file.is_file() and file.suffix not in WEIGHTS:
            shutil.copyfile(file, out / file.name)
    return out


_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_TEXT = ("lm_head.", "embed_tokens.", "layers.", "norm.")


def _bare(name: str) -> str:
    """Return a tensor's name without the prefixes that differ between text and video models and versions."""
    while name.startswith(("model.", "language_model.")):
        name = name.partition(".")[2]
    return name


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    if not found:
        raise FileNotFoundError(f"no *.safetensors in {folder}: convert the checkpoint with save_pretrained")
    return found


def tensor_shape(file: Path, name: str) -> list[int]:
    """Return a tensor's shape without loading it."""
    with safe_open(file, "pt") as tensors:
        return tensors.get_slice(name).get_shape()


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Load one tensor."""
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)
