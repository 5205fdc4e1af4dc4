"""Merge a trained text model back into the checkpoint of its video model."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoConfig

from rlfuse.config.model_files import WEIGHTS
from rlfuse.tensor_files import map_tensors, safetensors_files


def join_checkpoint(text_folder: str | Path, whole_folder: str | Path, out: str | Path) -> Path:
    """Write the model at `whole_folder` with the trained text part's tensors to `out`; return `out`.

    Raises ValueError before writing if the tensors do not match.
    """
    text_folder, whole_folder, out = Path(text_folder), Path(whole_folder), Path(out)
    trained = {_bare(name): tensor for file in safetensors_files(text_folder) for name, tensor in map_tensors(file)}
    if (tied := AutoConfig.from_pretrained(whole_folder).tie_word_embeddings) and _EMBEDDING in trained:
        trained[_HEAD] = trained[_EMBEDDING].clone()  # a file has no two tensors with the same memory
    shards = {file.name: dict(map_tensors(file)) for file in safetensors_files(whole_folder)}
    whole = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    own = {_bare(name) for name in whole}
    missing = sorted(name for name in own - trained.keys() if name.startswith(_TEXT))
    extra = sorted(trained.keys() - own - ({_HEAD} if tied else set()))
    wrong = [name for name, tensor in whole.items() if trained.get(_bare(name), tensor).shape != tensor.shape]
    if missing or extra or wrong:
        raise ValueError(
            f"{text_folder} is not the text part of {whole_folder}: missing {missing[:3]}, unknown {extra[:3]}, "
            f"different shape {wrong[:3]}. Pass the model that the training started from."
        )
    out.mkdir(parents=True)
    for shard, tensors in shards.items():
        joined = {name: trained.get(_bare(name), tensor) for name, tensor in tensors.items()}
        save_file(joined, out / shard, {"format": "pt"})
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
