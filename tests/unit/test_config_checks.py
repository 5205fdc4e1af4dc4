import json
import math
import os
import subprocess
import sys

import pytest

from rlfuse.config.checks import check
from rlfuse.config.documentation import keys
from rlfuse.config.facts import Facts, read_facts
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError, DataError, ErrorCollector

CORRECTION = "algorithm__rollout_correction__"
DISTILLED = {"algorithm__adv_estimator": "distill", "ref__path": "some/teacher"}


def sound(**changes):
    config = Config()
    config.data.train_files, config.model.path = ["train.parquet"], "model"
    config.reward.functions = ["rewards.py:score"]
    for name, value in changes.items():
        change(config, name.replace("__", "."), value)
    return config


def change(config, name, value):
    *groups, leaf = name.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, leaf, value)


def test_the_defaults_are_valid():
    assert check(sound(), Facts(context_length=1024, attention_heads=16, cuda=False)) == []


def test_distillation_does_not_need_a_reward():
    assert check(sound(**DISTILLED, reward__functions=[]), Facts()) == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"rollout__draft": "history", "fusion__data": "tail_batching"},
            ["rollout.draft=history: requires fusion.data=exact", "set fusion.data=exact, or rollout.draft=ngram"],
        ),
        (
            {"rollout__draft": "history", "rollout__draft_store_mb": 0},
            ["rollout.draft_store_mb=0: must be above 0 with rollout.draft=history"],
        ),
        (
            {"rollout__draft": "history", "trainer__deterministic": True, "fusion__policy": "serial"},
            ["rollout.draft=history: verifies several tokens at once", "or trainer.deterministic=false"],
        ),
        ({"algorithm__adv_estimator": "grp"}, ["`grp` is not one of gae, grpo", "did you mean grpo?"]),
        ({"algorithm__adv_estimator": "grpo"}, ["rollout.n=1: must be 2 or more"]),
        ({"trainer__logger": ["console", "swanlab"]}, ["`swanlab` is not one of console, wandb, tensorboard, mlflow"]),
        ({"actor__ppo_mini_batch_size": 60}, ["must divide data.train_batch_size=64", "ppo_mini_batch_size=64"]),
        ({"actor__ppo_mini_batch_size": 2, "trainer__n_gpus_per_node": 8}, ["2 samples: must be at least the 8 slots"]),
        ({"data__max_prompt_length": 900}, ["= 1412: must be at most 1024", "shorten one by 388"]),
        ({"rollout__tensor_model_parallel_size": 2}, ["must divide the 1 slots"]),
        ({"rollout__tensor_model_parallel_size": 3, "trainer__n_gpus_per_node": 3}, ["16 attention heads"]),
        ({"rollout__temperature": 0.0}, ["rollout.temperature=0.0: must be above 0", "val_kwargs.temperature=0"]),
        ({"ref__sync_ref_model": True}, ["ref.sync_ref_model=true: has no effect without a KL penalty or loss"]),
        (
            {
                "ref__sync_ref_model": True,
                "actor__use_kl_loss": True,
                "training__pipeline_parallel_size": 2,
                "trainer__n_gpus_per_node": 2,
            },
            ["ref.sync_ref_model=true: can't be combined with pipeline parallelism"],
        ),
        (
            {"ref__sync_ref_model": True, "trainer__task": "sft"},
            ["ref.sync_ref_model=true: trainer.task=sft has no reference policy; set ref.sync_ref_model=false"],
        ),
        ({"actor__optim__betas": [0.9]}, ["actor.optim.betas=[0.9]: must be two numbers of 0 or more and below 1"]),
        ({"critic__optim__betas": [0.9, 1.0]}, ["critic.optim.betas=[0.9,1.0]: must be two numbers"]),
        ({"algorithm__gamma": float("nan")}, ["algorithm.gamma=nan: must be 0 or more and 1 or less"]),
        (
            {"trainer__deterministic": True},
            ["fusion.policy=adaptive: depends on measured times", "fusion.policy=serial"],
        ),
        ({"reward__functions": []}, ["no reward; give at least one function"]),
        ({"reward__functions": ["rewards.py"]}, ["has no function name; write it as path/file.py:function"]),
        ({"reward__functions": ["absent.py:f"]}, ["the file `absent.py` does not exist"]),
        ({"reward__functions": ["absent_package.m:f"]}, ["no Python package `absent_package`"]),
        ({"reward__weights": [1.0, 2.0]}, ["has 2 entries but needs 1"]),
        ({"reward__functions": [{"path": "absent.py:f", "gate": True}, "a.py:f"]}, ["`absent.py` does not exist"]),
        ({"reward__functions": [{"path": "a.py:f", "wieght": 2}]}, ["did you mean weight?"]),
        ({"reward__functions": ["https://:80/x"]}, ["is not the URL of a service"]),
        ({"reward__functions": [3]}, ["got 3; an entry must be a string or a dictionary with a path"]),
        ({"algorithm__kl_coef_by_source": {"math": 0.0}}, ["has no effect without a KL", "actor.use_kl_loss=true"]),
        (
            {"algorithm__kl_coef_by_source": {"math": -1.0}, "actor__use_kl_loss": True},
            ["kl_coef_by_source.math=-1.0: must be 0 or more"],
        ),
        (
            {
                "algorithm__kl_coef_by_source": {"math": 0.0},
                "algorithm__use_kl_in_reward": True,
                "algorithm__kl_ctrl__type": "adaptive",
            },
            ["kl_ctrl.type=adaptive: adapts one coefficient"],
        ),
        (
            {"algorithm__adv_estimator": "gdpo", "algorithm__use_kl_in_reward": True, "rollout__n": 2},
            ["set actor.use_kl_loss=true"],
        ),
        ({"algorithm__adv_estimator": "gdpo"}, ["rollout.n=1: must be 2 or more"]),
        (
            {"algorithm__adv_estimator": "distill"},
            ["ref.path=null: must be the teacher's model folder or hub name", "set it to a model with the vocabulary"],
        ),
        (
            DISTILLED | {"algorithm__use_kl_in_reward": True},
            ["algorithm.use_kl_in_reward=true: has no effect on advantages with algorithm.adv_estimator=distill"],
        ),
        (
            DISTILLED | {"reward__functions": [], "data__val_files": ["val.parquet"]},
            ["reward.functions=[]: validation (data.val_files) needs a reward", "or set data.val_files=[]"],
        ),
        (
            {"reward__model_head": "rewards.py:Head"},
            ["reward.model_head=rewards.py:Head: is the head of a reward model"],
        ),
        ({"reward__overlong_buffer__len": 512}, ["must be below data.max_response_length=512"]),
        ({"data__train_files": ["absent.parquet"]}, ["data.train_files: `absent.parquet` does not exist"]),
        ({"data__train_files": []}, ["data.train_files: is required"]),
        ({"model__path": ""}, ["model.path: is required"]),
        ({"actor__offload_optimizer": True}, ["needs GPUs", "actor.offload_optimizer=false"]),
        (
            {"actor__optimizer_residency": "step"},
            ["actor.optimizer_residency=step: needs GPUs", "set actor.optimizer_residency=training"],
        ),
        ({"rollout__weight_transfer": "ipc"}, ["needs GPUs", "rollout.weight_transfer=auto"]),
        *(
            ({"rollout__engine_kwargs": {name: value}}, [f"rollout.engine_kwargs.{name}={value}: must be {valid}"])
            for name, valid, values in (
                ("kv_cache_memory_bytes", "a whole number of 1 or more", (0, -1, 0.5, "4G")),
                ("num_gpu_blocks_override", "a whole number of 1 or more", (0, float("inf"))),
                ("max_num_seqs", "a whole number of 1 or more", (-2,)),
                ("gpu_memory_utilization", "above 0 and 1 or less", (0.0, 1.5)),
            )
            for value in values
        ),
        ({"rollout__weight_transfer": "nccl"}, ["NCCL rejects two ranks on one GPU", "use one of auto, shm, ipc"]),
        (
            {"video__freeze_vision_tower": False, "training__pipeline_parallel_size": 2, "trainer__n_gpus_per_node": 2},
            [
                "freeze_vision_tower=false: can't be false with pipeline parallelism",
                "training.pipeline_parallel_size=1",
            ],
        ),
        (
            {"training__virtual_pipeline_model_parallel_size": 2},
            ["virtual_pipeline_model_parallel_size=2: needs training.pipeline_parallel_size above 1", "this to 1"],
        ),
        (
            {"training__vocabulary_parallel": True},
            ["vocabulary_parallel=true: needs training.pipeline_parallel_size above 1", "set it to false"],
        ),
        (
            {
                "video__freeze_vision_tower": False,
                "fusion__data": "one_step_off",
                "algorithm__rollout_correction__rollout_is": "token",
            },
            ["trains on clips encoded by older towers"],
        ),
        (
            {"video__freeze_vision_tower": False, "video__disk_cache": "/tmp"},
            ["embeddings, which become stale when the vision tower is trained"],
        ),
        (
            {"video__freeze_vision_tower": False, "video__encode_ahead": True},
            ["video.encode_ahead=true", "set it to false"],
        ),
        ({"video__levels": [4, 8]}, ["video.levels=[4,8]: must be whole numbers of at least 1 in descending order"]),
        (
            {"video__sampling": "seed_vl", "video__levels": [8], "video__max_tokens": 4},
            ["video.max_tokens=4: must be at least the smallest", "8"],
        ),
        ({"trainer__logger": ["tensorboard"]}, ["tensorboard is not installed", "rlfuse[tensorboard]"]),
        ({"trainer__logger": ["mlflow"]}, ["mlflow is not installed", "rlfuse[mlflow]"]),
        ({"alerts__grad_norm_factor": 1.0}, ["alerts.grad_norm_factor=1.0: must be above 1, or null"]),
        ({"trainer__resume_mode": "atuo"}, ["that folder does not exist; did you mean auto?"]),
        ({"trainer__critic_warmup": 2, "algorithm__adv_estimator": "reinforce_plus_plus"}, ["which has no critic"]),
        ({"algorithm__kl_ctrl__type": "adaptive"}, ["only with algorithm.use_kl_in_reward=true"]),
        (
            {
                "algorithm__use_kl_in_reward": True,
                "algorithm__kl_ctrl__type": "adaptive",
                "algorithm__kl_ctrl__horizon": 100,
                "data__train_batch_size": 500,
                "actor__ppo_mini_batch_size": 500,
            },
            ["algorithm.kl_ctrl.horizon=100: must be above 100: a step of 500 samples", "set it to 5000"],
        ),
        ({"algorithm__filter_groups__enable": True}, ["must be false with rollout.n=1"]),
        ({"rollout__val_kwargs__n": 4}, ["all responses to a prompt are equal"]),
        ({"algorithm__old_log_probs": "engine", "rollout__top_p": 0.9}, ["must be 1.0 with algorithm.old_log_probs"]),
        ({"algorithm__old_log_probs": "engine", "rollout__min_p": 0.1}, ["must be 0.0 with algorithm.old_log_probs"]),
        ({"rollout__stop": ["a", ""]}, ["rollout.stop=[a,]", "an empty string would stop every response"]),
        ({"rollout__stop": ["\\n\\n"]}, ["a backslash and a letter, not as a line break", "job file"]),
        (
            {"algorithm__old_log_probs": "engine", "algorithm__rollout_correction__rollout_is": "token"},
            ["requires algorithm.old_log_probs=trainer"],
        ),
        (
            {
                "algorithm__old_log_probs": "engine",
                f"{CORRECTION}rollout_rs": "token_k1",
                f"{CORRECTION}rollout_rs_threshold": 2,
            },
            ["rollout_rs=token_k1: corrects the mismatch", "requires algorithm.old_log_probs=trainer"],
        ),
        (
            {f"{CORRECTION}rollout_rs": "token_k1"},
            ["rollout_rs_threshold=null: is required with", "rollout_rs=token_k1"],
        ),
        ({f"{CORRECTION}rollout_rs_threshold": 2}, ["rollout_rs_threshold=2: has no effect with", "rollout_rs=null"]),
        ({f"{CORRECTION}rollout_is_threshold": 5.0}, ["threshold=5.0: has no effect with", "rollout_is=null"]),
        (
            {f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_is_threshold_lower": 2.0},
            ["rollout_is_threshold_lower=2.0: must be below rollout_is_threshold=2"],
        ),
        (
            {f"{CORRECTION}rollout_rs": "seq_mean_k1", f"{CORRECTION}rollout_rs_threshold": 0.5},
            ["rollout_rs_threshold=0.5: must be above 1 for k1 without a lower bound"],
        ),
        (
            {
                f"{CORRECTION}rollout_rs": "token_k3",
                f"{CORRECTION}rollout_rs_threshold": 0.5,
                f"{CORRECTION}rollout_rs_threshold_lower": 0.1,
            },
            ["rollout_rs_threshold_lower=0.1: applies to k1 only", "set null"],
        ),
        (
            {"actor__loss_mode": "clip_cov", "actor__clip_cov_lb": 6.0},
            ["actor.clip_cov_lb=6.0: must be below actor.clip_cov_ub=5"],
        ),
        ({"fusion__data": "one_step_off"}, ["with older weights", "set algorithm.rollout_correction.rollout_is=token"]),
        (
            {"fusion__data": "partial_rollout"},
            ["with older weights", "set algorithm.rollout_correction.rollout_is=token"],
        ),
        (
            {
                "fusion__data": "tail_batching",
                "algorithm__filter_groups__enable": True,
                "rollout__n": 2,
            },
            ["selects the groups of a step itself", "filter_groups.enable=false"],
        ),
        ({"fusion__credit_samples": 0}, ["must be 1 or more, or null"]),
        (
            {"training__ulysses_sequence_parallel_size": 4, "trainer__n_gpus_per_node": 2},
            ["must be a power of two that divides the 2 slots and the 16 attention heads", "size=2"],
        ),
        (
            {"training__ulysses_sequence_parallel_size": 3, "trainer__n_gpus_per_node": 12},
            ["size=3: must be a power of two that divides the 12 slots and the 16", "size=2"],
        ),
        (
            {
                "training__ulysses_sequence_parallel_size": 2,
                "training__pipeline_parallel_size": 2,
                "trainer__n_gpus_per_node": 2,
            },
            ["training.pipeline_parallel_size to 1"],
        ),
        (
            {"training__tensor_model_parallel_size": 4, "trainer__n_gpus_per_node": 6},
            [
                "must divide the 16 attention heads",
                "and the 6 slots of a node",
                "set training.tensor_model_parallel_size=2",
            ],
        ),
        (
            {
                "training__tensor_model_parallel_size": 2,
                "trainer__n_gpus_per_node": 2,
                "actor__zero_stage": 3,
            },
            ["actor.zero_stage=3: ZeRO 3 can't shard weights", "set actor.zero_stage=1"],
        ),
        (
            {
                "training__tensor_model_parallel_size": 2,
                "training__pipeline_parallel_size": 2,
                "trainer__n_gpus_per_node": 6,
            },
            ["pipeline_parallel_size=2: must divide the 6 / 2 (training.tensor_model_parallel_size=2 ranks are one"],
        ),
        (
            {
                "training__tensor_model_parallel_size": 2,
                "training__pipeline_parallel_size": 2,
                "training__vocabulary_parallel": True,
                "trainer__n_gpus_per_node": 4,
            },
            ["training.vocabulary_parallel=true: can't be combined", "set it to false, or"],
        ),
        (
            {
                "training__tensor_model_parallel_size": 2,
                "training__ulysses_sequence_parallel_size": 4,
                "trainer__n_gpus_per_node": 4,
            },
            ["divides the 2 slots and the 8 attention heads", "(training.tensor_model_parallel_size=2 ranks share"],
        ),
        (
            {
                "training__tensor_model_parallel_size": 2,
                "trainer__n_gpus_per_node": 2,
                "video__freeze_vision_tower": False,
            },
            ["video.freeze_vision_tower=false: can't be false with tensor parallelism"],
        ),
        ({"fusion__policy": "streem"}, ["did you mean stream?"]),
        (
            {"cluster__drain": [2], "trainer__n_gpus_per_node": 4, "rollout__tensor_model_parallel_size": 2},
            ["cluster.drain=[2]: must list slots of this job, 0 to 1, without duplicates; remove the others"],
        ),
        ({"cluster__drain": [1, 1], "trainer__n_gpus_per_node": 4}, ["without duplicates"]),
        (
            {"cluster__drain": [0]},
            ["cluster.drain=[0]: must leave at least one of the 1 slots undrained; leave it empty"],
        ),
        (
            {"cluster__drain": [0, 1], "trainer__n_gpus_per_node": 2},
            ["must leave at least one of the 2 slots undrained; list at most 1 slots"],
        ),
    ],
)
def test_one_mistake_is_reported_in_one_message_with_its_remedy(changes, parts):
    missing = frozenset({"absent.py", "absent.parquet", "atuo"})
    modules = frozenset({"absent_package"})
    loggers = frozenset({"tensorboard", "mlflow"})
    facts = Facts(1024, 16, missing=missing, unknown_modules=modules, cuda=False, missing_loggers=loggers)
    problems = check(sound(**changes), facts)
    assert len(problems) == 1
    assert all(part in problems[0] for part in parts), problems[0]


@pytest.mark.parametrize("vocabulary, remedy", [(62, "set it to false, or {}=2"), (61, "set it to false")])
def test_vocabulary_parallelism_requires_stages_that_divide_the_vocabulary(vocabulary, remedy):
    """Check that the suggested number of stages divides the vocabulary."""
    stages = "training.pipeline_parallel_size"
    of_four = {"training__pipeline_parallel_size": 4, "trainer__n_gpus_per_node": 4}
    config, facts = sound(training__vocabulary_parallel=True, **of_four), Facts(1024, 16, vocabulary=vocabulary)
    [problem] = check(config, facts)
    assert f"{stages}=4 must divide the {vocabulary} tokens" in problem
    assert problem.endswith("; " + remedy.format(stages))
    assert check(config, Facts(1024, 16, vocabulary=64)) == []


@pytest.mark.parametrize("key", [key for key in keys() if key.range], ids=lambda key: key.name)
def test_a_number_out_of_range_is_refused_with_its_range(key):
    below = key.above if key.above is not None else key.at_least - 1 - 2 * key.or_minus_one
    above = [] if key.at_most is None else [key.at_most + 1]
    for value in [below, *above, *([math.nan, math.inf] if key.type.startswith("float") else [])]:
        config, refusal = sound(), f"{key.name}={value}: must be {key.limits}; "
        change(config, key.name, value)
        [problem] = [each for each in check(config, Facts()) if each.startswith(refusal)]
        assert problem.removeprefix(refusal) == (key.remedy or f"the default is {key.name}={key.default_text}")


def test_all_problems_are_reported_together_and_numbered():
    config = sound(
        algorithm__adv_estimator="grpo", actor__ppo_mini_batch_size=7, rollout__top_p=2.0, fusion__policy="x"
    )
    problems = check(config, Facts())
    assert len(problems) == 4
    text = str(ConfigError(problems))
    assert text.startswith("The configuration has 4 problems:") and "\n  4. " in text
    assert isinstance(ConfigError(problems), ValueError)


def test_unknown_facts_raise_no_problem():
    config = sound(actor__offload_optimizer=True, rollout__weight_transfer="ipc", data__max_prompt_length=10**6)
    assert check(config, Facts()) == []


def test_facts_are_read_from_a_model_folder(tmp_path):
    model = {"model_type": "x", "text_config": {"max_position_embeddings": 64, "num_attention_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = sound(model__path=str(tmp_path), critic__path=str(tmp_path / "absent"), cluster__device="cpu")
    config.reward.functions = [f"{tmp_path}/r.py:f", "rlfuse.samples:f", "no_such_package_1.a:f"]
    assert "no tokenizer" in read_facts(config).model_problems["model.path"]
    (tmp_path / "tokenizer.json").write_text("{}")
    facts = read_facts(config)
    assert (facts.context_length, facts.attention_heads, facts.cuda) == (64, 4, False)
    assert facts.model_problems == {"critic.path": "the folder does not exist"}
    assert facts.missing == {"train.parquet", f"{tmp_path}/r.py"}
    assert facts.unknown_modules == {"no_such_package_1"}
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in read_facts(config).model_problems["model.path"]


def test_a_missing_device_is_reported():
    assert check(sound(cluster__device="cuda"), Facts(cuda=True, gpus=None)) == []
    [problem] = check(sound(cluster__device="cuda"), Facts(cuda=True, gpus=0))
    assert problem.startswith("cluster.device=cuda: this machine has no GPU") and "cluster.ray_address" in problem
    [problem] = check(sound(trainer__n_gpus_per_node=4), Facts(cuda=True, gpus=2))
    assert problem.startswith("trainer.n_gpus_per_node=4: this machine has 2 GPUs; set 2")


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").touch()
    config = sound(trainer__default_local_dir=str(tmp_path / "file" / "runs"))
    [problem] = [p for p in check(config, read_facts(config)) if p.startswith("trainer.default_local_dir")]
    assert f"{tmp_path}/file is not writable (Not a directory)" in problem
    config = sound(trainer__default_local_dir=str(tmp_path / "new"))
    assert read_facts(config).unwritable is None and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_models_on_the_hub_are_looked_up_in_parallel(tmp_path):
    """Run in a separate process, since HF_ENDPOINT is read at import."""
    code = """if True:
        import os, time, sys
        from pathlib import Path
        from rlfuse.config.facts import read_facts
        from rlfuse.config.schema import Config
        config = Config()
        config.data.train_files, config.model.path = [], "some/policy"
        config.ref.path, config.reward.model_path = "some/reference", "some/policy"
        began = time.monotonic()
        for name, why in read_facts(config).model_problems.items():
            print(name, why)
        assert time.monotonic() - began < 25, "a download would retry for 30 s"
        kept = Path(os.environ["HF_HOME"], "hub", "models--some--policy")
        (kept / "snapshots" / "a").mkdir(parents=True), (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("a")
        (kept / "snapshots" / "a" / "config.json").write_text('{"max_position_embeddings": 77}')
        (kept / "snapshots" / "a" / "model.safetensors").touch()
        config.ref.path = None
        assert read_facts(config).context_length == 77, "a failed lookup is repeated"
        assert "transformers" not in sys.modules"""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["model.path", "ref.path"]
    assert done.stdout.count("can't be reached") == 2


def test_errors_of_several_parts_are_raised_together():
    errors = ErrorCollector()
    errors.raise_all()
    with errors.collect():
        raise DataError("a row is wrong")
    with pytest.raises(DataError, match="a row is wrong"):
        errors.raise_all()
    with errors.collect():
        raise ConfigError(["one key", "another"])
    with pytest.raises(ConfigError) as error:
        errors.raise_all()
    assert error.value.problems == ["a row is wrong", "one key", "another"]
    with pytest.raises(ValueError, match="a defect"), errors.collect():
        raise ValueError("a defect")
