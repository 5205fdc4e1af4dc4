"""A job on a user-defined family of video models, which driver, encoder, engine and trainer load from a user's file."""

import json
import re
from pathlib import Path

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from rlfuse.observe.tracking import read_metrics
from rlfuse.tasks.clips import SIGNS, WORDS, Clips, Kind, write_task
from rlfuse.tasks.small_video_models import byte_tokenizer

README = Path(__file__).parents[2] / "rlfuse/video/README.md"
REWARD = '''
def first_letter(data_source, solution_str, ground_truth, extra_info=None):
    """How early in the alphabet the first word begins; any text has a reward."""
    return (ord(solution_str[0]) % 7) / 7 if solution_str else 0.0
'''
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}


def write_small_qwen2_vl(folder):
    tokenizer = byte_tokenizer([*WORDS, *SIGNS])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<stop>"]})
    text = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    text |= dict(num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    text |= dict(max_position_embeddings=2048, initializer_range=0.15)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = dict(depth=1, embed_dim=64, num_heads=2, hidden_size=64, initializer_range=0.1)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<start>", "vision_end": "<stop>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(word) for name, word in names.items()}
    torch.manual_seed(0)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, dtype="float32", **ids)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))


def test_a_job_trains_with_the_custom_family_of_the_readme(driven, tmp_path):
    write_task(tmp_path, Clips(train=4, val=2, kinds=(Kind.ORDER,), shortest_s=10, longest_s=20))
    write_small_qwen2_vl(tmp_path / "model")
    (tmp_path / "first_letter.py").write_text(REWARD)
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1])
    settings = {
        "model.path": tmp_path / "model",
        "model.video_family": f"{tmp_path}/mine.py:Qwen2VL",
        "data.train_files": f"[{tmp_path}/train.parquet]",
        "data.max_prompt_length": 600,
        "data.max_response_length": 8,
        "data.train_batch_size": 4,
        "actor.ppo_mini_batch_size": 2,
        "rollout.n": 2,
        "rollout.kv_cache_memory_mb": 64,
        "reward.functions": f"[{tmp_path}/first_letter.py:first_letter]",
        "video.sampling": "seed_vl",
        "video.levels": "[4]",
        "video.max_tokens": 64,
        "video.freeze_vision_tower": "false",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2,
        "trainer.experiment_name": "run",
    }
    status, text = driven("rlfuse_command", tmp_path, "train", **settings)
    assert status == 0, text
    steps = [row for row in read_metrics(tmp_path / "runs/rlfuse/run/metrics.jsonl") if row["step"] > 0]
    assert len(steps) == 2
    for row in steps:
        assert row["training/rollout_probs_diff_max"] < 1e-4, "positions of engine and trainer differ"
