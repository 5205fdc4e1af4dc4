"""Read a model's weights under checkpoint names, bucket by bucket: for weight sync and `huggingface/` folders.

Under ZeRO 3 every rank (where ranks share layers, those that do) calls the same method with the same names; only rank 0
writes. At most one bucket of weights exists in addition to the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from rlfuse.config.model_files import NOT_KEPT, copy_files, with_keys_of
from rlfuse.engines.trainer.saving import CheckpointWriter
from rlfuse.engines.trainer.tensor_parallel import is_share
from rlfuse.engines.trainer.vision_tower import SUBMODULE as TOWER

if TYPE_CHECKING:
    from rlfuse.engines.trainer.sharded_model import ShardedModel
    from rlfuse.engines.trainer.tensor_parallel import TensorShares


TRAINED = ("architectures", "auto_map", "id2label", "label2id", "pad_token_id", "tie_word_embeddings")
"""Keys that the trainer, or transformers for it, may set."""


class Exporter:
    """Reads the weights of one model, sharded or not, without those of its vision tower."""

    def __init__(
        self, model: PreTrainedModel, rank: int, ranks: TensorShares | None = None, sharded: ShardedModel | None = None
    ):
        """Create an exporter. `ranks`: group with the other shares of layers; `sharded`: backend model of `model`."""
        self.model, self.rank, self.ranks, self._sharded = model, rank, ranks, sharded
        tied = set(model.all_tied_weights_keys or ())
        self.tensors = {name: each for name, each in model.named_parameters() if not name.startswith(f"{TOWER}.")}
        stored = {name for name in model.state_dict() if not name.startswith(f"{TOWER}.")}
        own_buffers = {name for name in stored if name not in self.tensors and name not in tied}
        self.tensors |= {name: tensor for name, tensor in model.named_buffers() if name in own_buffers}

    def sizes(self) -> list[tuple[str, int]]:
        """Return (name, whole bytes) of every tensor; tied weights once."""
        return [(name, self._nbytes(tensor) * self._shares(tensor)) for name, tensor in self.tensors.items()]

    def _nbytes(self, tensor: torch.Tensor) -> int:
        return self._sharded.nbytes(tensor) if self._sharded else tensor.nbytes

    def _shares(self, tensor: torch.Tensor) -> int:
        return self.ranks.degree if self.ranks and is_share(tensor) else 1

    @contextmanager
    def gathered(self, names: list[str], everywhere: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the named tensors, whole, under checkpoint names, on rank 0 or `everywhere`; other ranks get none."""
        tensors = [self.tensors[name] for name in names]
        with self._sharded.gathered(tensors) if self._sharded else nullcontext(tensors) as gathered:
            has, whole = everywhere or self.rank == 0, {}
            for name, tensor, unsharded in zip(names, tensors, gathered, strict=True):
                needed = self._shares(tensor) > 1 and (everywhere or self.rank < self.ranks.degree)
                found = self.ranks.gather_whole(tensor, tensor.partition_dim) if needed else unsharded.detach()
                if has:  # otherwise each is freed before the next one is gathered
                    whole[name] = found
            yield revert_weight_conversion(self.model, whole) if has else {}

    def write(self, names: list[str], path: Path, files: CheckpointWriter | None = None) -> list[str]:
        """Write the named tensors to a safetensors file; return their checkpoint names (rank 0). `files` collects
        failures."""
        with self.gathered(names) as tensors:
            if self.rank == 0 and files is not None:
                files.write(path, lambda: self._save(tensors, path))
            elif self.rank == 0:
                self._save(tensors, path)
            return list(tensors)

    def save_pretrained(self, folder: Path, buckets: list[list[str]], files: CheckpointWriter) -> None:
        """Write a folder that `from_pretrained` and vLLM load: config and one shard per bucket."""
        weight_map: dict[str, str] = {}
        if self.rank == 0:
            files.write(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        for i, names in enumerate(buckets):
            shard = f"model-{i + 1:05d}-of-{len(buckets):05d}.safetensors"
            weight_map |= dict.fromkeys(self.write(names, folder / shard, files), shard)
        if self.rank == 0:
            files.write(folder, lambda: self._describe(folder, weight_map))

    @staticmethod
    def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path, {"format": "pt"})

    def save_config(self, folder: Path) -> None:
        """Write config.json, custom code, and the source's generation_config.json, which transformers may refuse to
        save."""
        config = self.model.config
        source = config.get_config_dict(config.name_or_path)[0] if config.name_or_path else {}
        try:
            saved = self._config_of(folder, source)
        except Exception:  # a custom class may raise anything
            if not source:
                raise
            copy_files(config.name_or_path, folder, "*.py")
            saved = {key: value for key, value in source.items() if key not in NOT_KEPT}
            saved |= {key: value for key in TRAINED if (value := getattr(config, key, None)) is not None}
            saved["torch_dtype"] = str(self.model.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
        if getattr(self.model, "generation_config", None) is not None:
            copy_files(config.name_or_path, folder, "generation_config.json")

    def _config_of(self, folder: Path, source: dict[str, Any]) -> dict[str, Any]:
        """Return the model's configuration with its source's keys; write custom code to `folder`."""
        config = self.model.config
        if self.model.is_remote_code():  # saves its code and refers to it in the config
            custom_object_save(self.model, str(folder), config=config)
        config.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        return with_keys_of(source, saved, json.loads(config.to_json_string(use_diff=False))) if source else saved

    def _describe(self, folder: Path, weight_map: dict[str, str]) -> None:
        self.save_config(folder)
        index = {"metadata": {"total_size": sum(size for _, size in self.sizes())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
