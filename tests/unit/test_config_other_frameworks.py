"""Messages about keys of verl are true of this code, and its keys are translated correctly.

`verl_keys.json` holds the names and defaults of verl's settings, as listed in its generated configuration.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

import rlfuse
from rlfuse.cli import MODULES
from rlfuse.config.checks import check
from rlfuse.config.compose import compose_job, read_command
from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.facts import Facts
from rlfuse.config.keys import explain_override, fits
from rlfuse.config.other_frameworks import NO_COUNTERPART, NO_COUNTERPART_WORDS, SAME_NAME, VERL, counterpart
from rlfuse.config.schema import Config
from rlfuse.data.rows import read_rows
from rlfuse.engines.trainer.micro_batches import balance
from rlfuse.errors import ConfigError
from rlfuse.fusion.policies import POLICIES

ROOT = Path(rlfuse.__file__).parent
VERLS = json.loads((Path(__file__).parent / "verl_keys.json").read_text())
KNOWN = frozenset(by_name())
SOURCE = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
OURS = {name: text for name, text in SOURCE.items() if not name.startswith("config/")}


def no_key(*words):
    return not [key.name for key in by_name().values() if any(word in key.name.lower() for word in words)]


def not_in_source(word):
    return not any(re.search(word, text) for text in OURS.values())


def source_has(file, *parts):
    return all(part in SOURCE[file] for part in parts)


def reads(column, marker):
    def read(tmp_path):
        row = {"prompt": f"{marker} a", column: ["a"], "data_source": "x", "reward_model": {"ground_truth": "1"}}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        (media,) = getattr(read_rows(str(tmp_path / "a.jsonl"), "prompt")[0], column)
        return media.source == str(tmp_path / "a")

    return read


FACTS = {
    "training uses DeepSpeed": lambda _: (
        not_in_source(r"(?i)fully_?sharded|\bmegatron\.core") and "actor.zero_stage" in KNOWN
    ),
    "generation and training always share the slots": lambda _: no_key(
        "resource_pool", "rollout.nnodes", "rollout.n_gpus"
    ),
    "tokens are always balanced over the ranks": lambda _: (
        [len(share) for share in balance([9, 3, 3, 3], 2)] in ([1, 3], [3, 1])
    ),
    "for validation only": lambda _: importlib.util.find_spec(MODULES["eval"]) is not None,
    "the number of prompts per step is": lambda _: no_key("gen_batch_size") and "data.train_batch_size" in KNOWN,
    "all validation rows": lambda _: no_key("val_batch_size"),
    "the column is always data_source": lambda _: source_has("data/rows.py", "data_source"),
    "prompts are always kept as messages": lambda _: source_has(
        "rewards/api/shapes.py", '"prompts": [item.prompt for item in items]'
    ),
    "the column is always images": reads("images", "<image>"),
    "the column is always videos": reads("videos", "<video>"),
    "engines always return log-probs": lambda _: source_has("engines/vllm/setup.py", "logprobs=0"),
    "engines load model.path": lambda _: no_key("load_format"),
    "engines are always asynchronous": lambda _: source_has("engines/vllm/setup.py", "AsyncEngineArgs"),
    "only single-turn rollouts": lambda _: no_key("turn", "tool", "agent"),
    "rollout.val_kwargs.temperature=0 is greedy": lambda _: not check_values({"rollout.val_kwargs.temperature": 0.0}),
    "LoRA is not supported": lambda _: no_key("lora") and not_in_source(r"\bpeft\b"),
    "edit config.json of the model": lambda _: no_key("override"),
    "reward functions are called for every sample": lambda _: no_key("manager"),
    "rewards are computed during generation": lambda _: set(POLICIES) - {"serial"} == {"stream", "rlhfuse", "adaptive"},
    "code in responses runs in a sandbox": lambda _: (
        importlib.util.find_spec("rlfuse.rewards.sandbox.sandbox") is not None
    ),
    "all files are written below": lambda _: no_key("hdfs", "remote_dir"),
    "cluster.timeout_s limits the start": lambda _: source_has("run/build.py", "timeout_s"),
    "groups are compared by": lambda _: no_key("groups.metric"),
    "samples are reweighted": lambda _: no_key("rollout_rs", "reject"),
    "the number of engines is slots /": lambda _: no_key("data_parallel", "replicas"),
    "Ray uses the devices": lambda _: "cluster.ray_address" in KNOWN and no_key("ray_init"),
    "every run records its events": lambda _: no_key("profil") and importlib.util.find_spec("rlfuse.tools.trace"),
    "micro-batches are always filled by tokens": lambda _: no_key("dynamic_bsz"),
    "passes without gradients use": lambda _: no_key("log_prob_", "forward_max"),
    "training does not use torch.compile": lambda _: not_in_source(r"torch\.compile\("),
}
"""Start of each reason why a key of verl has no counterpart -> a check that the reason is true."""


def check_values(values):
    """Return the problems of these values."""
    config = Config()
    config.data.train_batch_size, config.trainer.n_gpus_per_node = 1024, 8  # as in verl
    for name, value in values.items():
        group, _, leaf = name.rpartition(".")
        node = config
        for part in group.split("."):
            node = getattr(node, part)
        setattr(node, leaf, value)
    return [problem for problem in check(config, Facts()) if problem.split("=")[0] in values]


REASONS = sorted({why for _, why in (*NO_COUNTERPART, *NO_COUNTERPART_WORDS)} | {n for k, n in VERL.values() if not k})


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_for_no_counterpart_is_true(reason, tmp_path):
    (fact,) = [fact for begin, fact in FACTS.items() if reason.startswith(begin)]
    assert fact(tmp_path)
    assert (
        set(re.findall(r"\b(?:actor|rollout|data|training|trainer|algorithm|cluster)\.[a-z_.]*[a-z]", reason)) <= KNOWN
    )


UNSUPPORTED = (
    *(f"actor_rollout_ref.{group}." for group in ("actor.fsdp_config", "ref.fsdp_config", "actor.megatron")),
    *("actor_rollout_ref.rollout.agent.", "actor_rollout_ref.model.lora.", "critic.fsdp.", "critic.model.lora."),
    *("reward.reward_manager.", "actor_rollout_ref.rollout.multi_turn."),
)
"""Groups of verl without a counterpart; their leaves may have the name of an unrelated key."""


@pytest.mark.slow
def test_each_key_of_verl_is_translated_to_existing_keys_or_explained():
    ours = {key.leaf: key.name for key in by_name().values()}
    for name in VERLS:
        found = counterpart(name, KNOWN) if name not in KNOWN else None
        if found is not None and not found.keys:
            assert name.rsplit(".", 1)[-1] not in ours or name.startswith(UNSUPPORTED), name
        assert name in KNOWN or name in str(explain_override(f"{name}=1")) or name.endswith("engine_kwargs.vllm"), name


RENAMED = {
    name: found.keys[0]
    for name, value in VERLS.items()
    if name not in KNOWN and value is not None
    if (found := counterpart(name, KNOWN)) and found.is_same and found.keys[0] in KNOWN
}


@pytest.mark.parametrize("name", RENAMED)
def test_defaults_of_verl_are_valid_for_the_translated_key(name):
    key, typed = by_name()[RENAMED[name]], as_typed(VERLS[name])
    written = counterpart(name, KNOWN).values.get(typed)
    value = yaml.safe_load(written) if written else VERLS[name]
    value = float(value) if key.type.startswith("float") and not written else value
    assert fits(value, key.type) and check_values({key.name: value}) == []
    if written:
        with pytest.raises(ConfigError, match=re.escape(f"write {key.name}={written} (")):
            read_command([f"{name}={typed}"])
    elif not typed.startswith("~"):  # a shell requires quotes for it
        taken = read_command([f"{name}={typed}"])
        assert taken.overrides == read_command([f"{key.name}={typed}"]).overrides
        assert taken.notes == [f"{name}={typed} -> {key.name}={typed}"]


def test_same_names_with_other_meanings_are_reported_only_to_users_of_verl():
    verls = ["actor_rollout_ref.rollout.n=4", "trainer.default_local_dir=a", "trainer.save_freq=-1"]
    notes = read_command(verls).notes
    assert notes[0] == "actor_rollout_ref.rollout.n=4 -> rollout.n=4" and len(notes) == 2
    assert "trainer.default_local_dir=a: differs from verl: rlfuse creates PROJECT/EXPERIMENT" in notes[1]
    assert read_command(verls[1:]).notes == [] and set(SAME_NAME) <= KNOWN & set(VERLS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["rollout.n=4", "actor_rollout_ref.rollout.n=8"], "rollout.n=4 sets rollout.n to another value"),
        (
            ["actor_rollout_ref.rollout.prompt_length=8", "data.max_prompt_length=9"],
            "actor_rollout_ref.rollout.prompt_length=8 sets data.max_prompt_length to another value",
        ),
    ],
)
def test_conflicting_values_from_two_names_of_a_key_are_refused(words, part, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_command(words)
    (tmp_path / "job.yaml").write_text("\n".join(word.replace("=", ": ") for word in words))
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_command([str(tmp_path / "job.yaml")])
    same = ["rollout.n=4", "+actor_rollout_ref.rollout.n=4"]
    assert read_command(same).overrides == ["rollout.n=4", "rollout.n=4"]


@pytest.mark.slow
def test_a_job_file_may_use_names_of_verl(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "experiment: quickstart\n"
        "actor_rollout_ref:\n"
        "  rollout: {n: 3, enforce_eager: true}\n"
        "  actor.optim.lr: 1e-4\n"
        "reward_model.num_workers: 2\n"
    )
    job = compose_job([str(path), "actor_rollout_ref.rollout.temperature=0.5"])
    assert (job.rollout.n, job.rollout.temperature, job.actor.optim.lr) == (3, 0.5, 1e-4)
    assert job.rollout.engine_kwargs.enforce_eager is True and job.reward.num_workers == 2
    notes = read_command([str(path)]).notes
    assert notes[0] == f"{path}:3: actor_rollout_ref.rollout.n=3 -> rollout.n=3" and len(notes) == 4
    path.write_text("actor_rollout_ref: {actor: {strategy: fsdp}, rollout.seed: 3}\n")
    with pytest.raises(ConfigError) as error:
        read_command([str(path)])
    assert [each.split(": ")[1] for each in error.value.problems[:2]] == [
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.rollout.seed",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "reward_model.model.path",
        "reward_model.overlong_buffer.len",
        "reward.reward_kwargs.overlong_buffer_cfg.len",
        "actor_rollout_ref.actor.optim.total_training_steps",
    ],
)
def test_keys_without_effect_in_verl_are_refused(name):
    with pytest.raises(ConfigError, match=f"{re.escape(name)}=9: is a name of verl; use .*in verl|which verl"):
        read_command([f"{name}=9"])
