"""Custom estimators, losses and KL functions: the README's example, checks of files, and trial calls."""

import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from test_experience import groups
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.algorithms.advantages import ESTIMATORS
from rlfuse.algorithms.experience import Experience
from rlfuse.algorithms.kl import KL_KINDS, kl_estimate
from rlfuse.algorithms.losses import LOSS_MODES, policy_loss
from rlfuse.algorithms.objectives import actor_objective
from rlfuse.algorithms.registry import Registry, parameters
from rlfuse.config import estimators
from rlfuse.config.checks import check, value_of
from rlfuse.config.custom_functions import PARAMETERS, traits_of
from rlfuse.config.declare import Effect
from rlfuse.config.facts import read_facts
from rlfuse.config.rewards import RewardEntry
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.attention import attend_by_layout
from rlfuse.engines.trainer.micro_batch_losses import actor_loss, log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.errors import ConfigError, FunctionError
from rlfuse.fusion.custom_policies import load_policy
from rlfuse.observe.custom_metrics import CustomMetrics
from rlfuse.run.resume.acceptance import with_local_paths, with_run_name
from rlfuse.run.resume.changes import differences
from rlfuse.run.trial_calls import call_custom_functions
from rlfuse.samples import Prompt, Row

PAGE = Path(__file__).parents[2] / "rlfuse/algorithms/README.md"
ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor.loss_mode"
CRITIC = """
from rlfuse.algorithms import registry
@registry.advantage_estimator(needs_critic=True, needs_batch=False, whitens="tokens")
def above_value(scores, values, mask, scale=2.0):
    return scale * (scores[:, None] - values) * mask
def late(log_probs): return torch.ones(3)
"""


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def config(*settings):
    node = OmegaConf.structured(Config)
    wanted = {"model.path": "m", "data.train_files": ["a"], "reward.functions": ["a.py:f"], "rollout.n": 2}
    for key, value in [*wanted.items(), *(each.split("=") for each in settings)]:
        OmegaConf.update(node, key, yaml.safe_load(value) if "kwargs" in key else value, force_add=True)
    return OmegaConf.to_object(node)


def reported(*settings):
    """Return the problems that the checks report for keys of custom functions and for `rollout.n`."""
    found = config(*settings)
    problems = check(found, read_facts(found))
    return [
        each for each in problems if each.startswith((*(f"{key}=" for key in PARAMETERS), "rollout.n=", "trainer.cri"))
    ]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return the settings of the README's valid job, with its file in the working folder."""
    (tmp_path / "mine.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    named_in_job = yaml.safe_load(block("yaml"))
    settings = [f"{group}.{key}={value}" for group, keys in named_in_job.items() for key, value in keys.items()]
    assert not reported(*settings)
    return settings


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text: Path("mine.py").write_text(text)


def test_readme_estimator_and_kl_match_manual_values(example):
    experience = Experience(config(*example, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.2"))
    batch = groups([[1.0, 0.0], [0.5, 2.0]], [[3, 2], [1, 4]])
    assert not experience.can_train_before_batch_completes("actor"), "the first batch is verified first"
    experience.prepare(batch)
    # Reference and policy differ by 0.5 nats per token: a KL of 0.5^2 / 2, which takes 0.025 off the reward.
    scores = [[1.0 - 3 * 0.025, -2 * 0.025], [0.5 - 0.025, 2.0 - 4 * 0.025]]
    found = [[sample.tensors["advantages"] for sample in group.samples] for group in batch]
    for (first, second), (one, other) in zip(found, scores, strict=True):
        np.testing.assert_allclose(first, one - other, atol=1e-6)
        np.testing.assert_allclose(second, other - one, atol=1e-6)
    experience.complete(batch)
    assert experience.can_train_before_batch_completes("actor") and "values" not in experience.kinds
    assert [len(each) for pair in found for each in pair] == [3, 2, 1, 4]


def test_readme_check_prints_the_documented_advantages(example):
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    exec(code, names := {})
    documented = re.search(r"print\(advantages\)  # (.*)", code)[1]
    assert names["advantages"].tolist() == yaml.safe_load(documented)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    small = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    return attend_by_layout(Qwen2ForCausalLM(Qwen2Config(vocab_size=40, num_hidden_layers=2, **small)))


def rows(model, settings):
    """Return two rows whose old log-probs differ by up to 0.6, and whose reference log-probs differ by 0.3 to 2.3."""
    ids, rng, batch = np.arange(3, 20, dtype=np.int32), np.random.default_rng(0), []
    for prompt, response in ((9, 3), (4, 5)):
        row = Row(ids[:prompt], ids[:response], {})
        with torch.no_grad():
            now = log_probs(settings, model, collate([row], True)).numpy()
        row.tensors["old_log_probs"] = (now + rng.uniform(-0.6, 0.6, response)).astype("f4")
        row.tensors["ref_log_probs"] = (now + 0.3 + np.arange(response) % 3).astype("f4")
        row.tensors["advantages"] = rng.normal(size=response).astype("f4")
        row.tensors["now"] = now
        batch.append(row)
    return batch


def test_readme_loss_and_kl_match_manual_values_in_the_trainer(example, model):
    settings = config(*example, "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.clip_ratio=0.3")
    batch = collate(rows(model, settings), True)
    loss, sums = actor_loss(settings, model, batch)
    loss.backward()
    wanted = kl = stopped = ppo_kl = 0.0
    for row in rows(model, settings):
        for now, old, ref, advantage in zip(
            *(row.tensors[name].tolist() for name in ("now", "old_log_probs", "ref_log_probs", "advantages")),
            strict=True,
        ):
            ratio, difference = math.exp(now - old), abs(now - ref)
            stops = advantage > 0 and ratio > 1.3
            stopped, ppo_kl = stopped + stops, ppo_kl + old - now
            wanted += 0.0 if stops else -advantage * ratio
            kl += difference**2 / 2 if difference < 1 else difference - 0.5
    assert 0 < stopped < 8
    assert sums["stopped"].item() == stopped and sums["ppo_kl"].item() == pytest.approx(ppo_kl, abs=1e-5)
    assert sums["pg_loss"].item() == pytest.approx(wanted, rel=1e-5) and sums["kl_loss"].item() == pytest.approx(
        kl, rel=1e-5
    )
    assert loss.item() == pytest.approx(wanted + 0.1 * kl, rel=1e-5)
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def test_traits_determine_critic_groups_and_whitening(write):
    write(CRITIC)
    found = config(f"{ESTIMATOR}=mine.py:above_value")
    assert found.uses_critic
    assert not reported(f"{ESTIMATOR}=mine.py:above_value", "trainer.critic_warmup=3", "rollout.n=1")
    experience, batch = Experience(found), groups([[1.0], [0.0]], [[3], [2]])
    assert "values" in experience.kinds and not experience.can_train_before_batch_completes("critic")
    assert "adv_estimator=mine.py:above_value normalises" in experience.overlap_blocker()
    experience.prepare(batch)
    np.testing.assert_array_equal(batch[0].samples[0].tensors["returns"], [2.0] * 3)
    experience.complete(batch)
    white = np.concatenate([group.samples[0].tensors["advantages"] for group in batch])
    assert white.mean() == pytest.approx(0, abs=1e-6) and white.std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert experience.can_train_before_batch_completes("critic") and not experience.can_train_before_batch_completes(
        "actor"
    )


ACROSS = """
from rlfuse.algorithms.registry import advantage_estimator
calls = []
def batch_mean(scores, mask):
    calls.append(len(scores)); assert str(scores.dtype) == "torch.float32"
    return (scores - scores.mean())[:, None] * mask
@advantage_estimator(needs_groups=True, needs_batch=False)
def claims_its_group(scores, mask): return batch_mean(scores, mask)
@advantage_estimator(needs_batch=False)
def claims_it_in_small_numbers(scores, mask): return 1e-4 * batch_mean(scores, mask)
@advantage_estimator(needs_batch=False, whitens="responses")
def claims_its_row(mask, scores, groups): return (scores * (groups + 1))[:, None] * mask
@advantage_estimator(needs_groups=True, needs_batch=False)
def group_mean(scores, groups, mask):
    calls.append(len(scores))
    total = [scores[groups == group].mean() for group in groups]
    return (scores - __import__("torch").stack(total))[:, None] * mask
@advantage_estimator(needs_batch=False, each_reward=True)
def each(dimensions, weights, groups, mask):
    assert {str(each.dtype) for each in (dimensions, weights, mask)} == {"torch.float32"}
    assert str(groups.dtype) == "torch.int64"
    return (dimensions @ weights)[:, None] * mask
"""


def advantages_of(experience, batch, order):
    """Prepare the groups in this order; return the advantage of each sample's first token."""
    for number in order:
        experience.prepare([batch[number]])
    experience.complete(batch)
    return [float(sample.tensors["advantages"][0]) for group in batch for sample in group.samples]


def test_custom_estimator_receives_the_whole_batch_by_default(write):
    write(ACROSS)
    for order in ([0, 1, 2], [2, 0, 1]):
        experience = Experience(config(f"{ESTIMATOR}=mine.py:batch_mean"))
        assert not experience.can_train_before_batch_completes(
            "actor"
        ) and not experience.can_train_before_batch_completes("critic")
        assert "mine.py:batch_mean reads the whole batch" in experience.overlap_blocker()
        batch = groups([[1.0, 0.0], [0.5, 2.0], [4.0, 0.0]], [[3, 2], [1, 4], [2, 2]])
        assert advantages_of(experience, batch, order) == [-0.25, -1.25, -0.75, 0.75, 2.75, -1.25]
        assert not experience.can_train_before_batch_completes("actor"), "also in later steps"
        assert set(ESTIMATORS.find("mine.py:batch_mean").__globals__["calls"]) == {6}


@pytest.mark.parametrize("name", ["claims_its_group", "claims_its_row", "claims_it_in_small_numbers"])
def test_estimator_that_violates_needs_batch_ends_the_run_before_the_first_update(write, name):
    write(ACROSS)
    experience = Experience(config(f"{ESTIMATOR}=mine.py:{name}"))
    batch = groups([[1.0, 0.0], [0.5, 2.0]], [[3, 2], [1, 4]])
    assert not experience.can_train_before_batch_completes("actor")
    words = r"declares needs_batch=False, but advantages of sample 1/\d/0, token 0, are \S+ from its group and \S+ from"
    with pytest.raises(ConfigError, match=f"mine.py:{name}: {words}"):
        advantages_of(experience, batch, [0, 1])


@pytest.mark.parametrize("name", ["group_mean", "each"])
def test_group_estimator_is_called_per_group_and_trains_early_after_verification(write, name):
    write(ACROSS)
    experience = Experience(config(f"{ESTIMATOR}=mine.py:{name}"))
    assert experience.overlap_blocker() == ""
    flat = groups([[1.0, 1.0], [1.0, 1.0]], [[3, 2], [1, 4]])
    advantages_of(experience, flat, [1, 0])
    assert not experience.can_train_before_batch_completes("actor"), "equal rewards verify nothing"
    batch = groups([[1.0, 0.0], [0.5, 2.0]], [[3, 2], [1, 4]])
    wanted = [0.5, -0.5, -0.75, 0.75] if name == "group_mean" else [1.0, 0.0, 0.5, 2.0]
    assert advantages_of(experience, batch, [0, 1]) == wanted
    assert experience.can_train_before_batch_completes("actor") and experience.can_train_before_batch_completes(
        "critic"
    )
    if name == "group_mean":
        experience.prepare(batch)
        assert ESTIMATORS.find("mine.py:group_mean").__globals__["calls"] == [2, 2, 4, 2, 2, 4, 2, 2]


def test_group_estimator_needs_n_above_1_and_no_critic_warmup(example):
    (first, second) = reported(*example, "rollout.n=1", "trainer.critic_warmup=2")
    assert first.startswith("rollout.n=1: must be 2 or more with algorithm.adv_estimator=mine.py:best_of_others")
    assert second.startswith("trainer.critic_warmup=2: must be 0 with algorithm.adv_estimator=mine.py:best_of_others")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"{ESTIMATOR}=other.py:f", "the file .*other.py does not exist; correct the path"),
        (f"{ESTIMATOR}=mine.py:best", "has no function `best`; its functions: f, g, k; name one"),
        (
            f"{LOSS}=mine.py:f",
            "parameter `scores` is not one of log_probs, old_.*; rename it, give it a default, or set",
        ),
        ("algorithm.kl_penalty=mine.py:g", "parameter `mask` is not one of log_probs, ref_log_probs, which are passed"),
        ("actor.kl_loss_type=mine.py:g", "parameter `mask` is not one of"),
        (f"{ESTIMATOR}=mine.py:k", r"`values` is only passed to estimators with needs_critic=True; put @adv"),
        (f"{ESTIMATOR}=mine.py", "is not one of gae, .*; or path/file.py:name for a custom one"),
        (f"{LOSS}=broken.py:f", "line 2: .*; correct the file"),
        (f"{LOSS}=lacking.py:f", "Python does not find the package `unheard_of`; install it"),
        (
            f"{ESTIMATOR}=traits.py:unknown",
            "unexpected keyword argument 'needs_group'; traits are needs_groups, needs_b",
        ),
        (f"{ESTIMATOR}=traits.py:wrong", "whitens=True must be 'tokens' or 'responses'"),
        (f"{ESTIMATOR}=traits.py:unscored", "needs_rewards=False must be True with needs_baseline=True"),
        (f"{ESTIMATOR}=traits.py:computed", "traits are .*, with the literal values"),
        (f"{ESTIMATOR}=traits.py:bare", r"pass traits by name, as in @advantage_estimator\(needs_groups=True\)"),
    ],
)
def test_invalid_custom_functions_are_reported_before_the_run_starts(write, setting, message):
    write("print('never run')\ndef f(scores, mask): ...\ndef g(log_probs, mask): ...\ndef k(values, mask): ...\n")
    Path("broken.py").write_text("def f(\n  x y): pass\n")
    Path("lacking.py").write_text("import math, unheard_of\nimport broken\ndef f(log_probs): ...\n")
    stated = {
        "unknown": "(needs_group=True)",
        "wrong": "(whitens=True)",
        "unscored": "(needs_baseline=True, needs_rewards=False)",
        "computed": "(needs_groups=bool(1))",
        "bare": "",
    }
    Path("traits.py").write_text("".join(f"@advantage_estimator{t}\ndef {n}(scores): ...\n" for n, t in stated.items()))
    (problem,) = reported(setting)
    assert problem.startswith(f"{setting}: ") and re.search(message, problem), problem


ARGUMENTS = """
from rlfuse.algorithms.registry import advantage_estimator
from rlfuse.fusion.policies import serial
@advantage_estimator(needs_batch=False)
def scaled(scores, mask, scale): return scale * scores[:, None] * mask
@advantage_estimator(needs_baseline=True)
def above_greedy(scores, baselines, mask): return (scores - baselines)[:, None] * mask
def shifted(log_probs, old_log_probs, advantages, mask, shift=0.0):
    return -(log_probs - old_log_probs - shift).exp() * advantages * mask
def squared(log_probs, ref_log_probs, times): return times * (log_probs - ref_log_probs) ** 2
def count(samples, least): return sum(len(each.response_ids) >= least for each in samples)
def later(view, patience): return serial(view) if patience else 1 / patience
def of_groups(scores, mask, n): return scores.view(-1, n).std(1).repeat_interleave(n)[:, None] * mask
@advantage_estimator(needs_baseline=True)
def above_greedy(scores, baselines, mask): return (scores - baselines)[:, None] * mask
def of_extras(samples): return sum(each.parts["reward"] + each.parts["reward/acc"] for each in samples)
def failing(scores, mask): return {}["score"]
def undefined(mask): return mask / 0 * 0
def detached(advantages, log_probs): return advantages * log_probs.detach()
def outside(view): return nothing
def missing(samples): return samples[0].columns["no_such_column"]
"""
PASSED = (
    f"{ESTIMATOR}=mine.py:scaled", "algorithm.adv_estimator_kwargs.scale=2.0",
    f"{LOSS}=mine.py:shifted", "actor.loss_mode_kwargs.shift=0.5", "actor.use_kl_loss=true",
    "actor.kl_loss_type=mine.py:squared", "actor.kl_loss_type_kwargs.times=3", "algorithm.use_kl_in_reward=true",
    "algorithm.kl_penalty=mine.py:squared", "algorithm.kl_penalty_kwargs.times=4", "fusion.policy=mine.py:later",
    "fusion.policy_kwargs.patience=1",
)  # fmt: skip


def with_metric(found, name, **kwargs):
    found.trainer.metrics, found.trainer.metrics_kwargs = [f"mine.py:{name}"], {name: kwargs} if kwargs else {}
    return found


def try_out(found):
    """Check the job and call its functions, as a run does at startup."""
    assert not [each for each in check(found, read_facts(found)) if "mine.py" in each or "kwargs" in each]
    load_policy(found.fusion.policy, kwargs=found.fusion.policy_kwargs)
    prompts = [Prompt(0, np.array([1], np.int32), "p", (), "s", None)]
    call_custom_functions(found, [RewardEntry("mine.py:reward", name="reward", weight=1.0)], prompts)


def test_kwargs_are_passed_to_custom_functions(write):
    write(ARGUMENTS)
    try_out(found := with_metric(config(*PASSED), "count", least=3))
    batch = groups([[1.0], [0.5]], [[3], [2]])
    experience = Experience(config(*PASSED[:2]))
    experience.prepare(batch)
    assert [group.samples[0].tensors["advantages"].tolist() for group in batch] == [[2.0] * 3, [1.0] * 2]
    one = torch.ones(1, 2)
    tensors = {"old_log_probs": one, "advantages": one, "ref_log_probs": 2 * one}
    loss, _ = actor_objective(found.actor, one, 0 * one, one.bool(), tensors, 2)
    wanted = 2 * -math.exp(-0.5) + found.actor.kl_loss_coef * 2 * 3
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    penalised = Experience(config("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=1", *PASSED[8:10]))
    penalised.prepare(batch)  # the reference differs by 0.5 nats
    np.testing.assert_allclose(batch[0].samples[0].tensors["token_rewards"], [-1.0, -1.0, 0.0], atol=1e-6)
    messages = []
    assert CustomMetrics(found, messages.append).of([group.samples[0] for group in batch]) == {"custom/count": 1}
    assert not messages


def assert_accepted(found):
    """Assert that the dummy calls of all custom functions succeed."""
    try_out(found)


@pytest.mark.parametrize("estimator", [*estimators.ESTIMATORS, "mine.py:above_greedy"])
def test_a_custom_loss_is_called_with_any_estimator(write, estimator):
    write(ARGUMENTS)
    assert_accepted(config(f"{ESTIMATOR}={estimator}", f"{LOSS}=mine.py:shifted", "rollout.n=2", "ref.path=teacher"))


@pytest.mark.parametrize(
    "settings",
    [
        [f"{ESTIMATOR}=mine.py:of_groups", "rollout.n=8"],
        [f"{ESTIMATOR}=mine.py:above_greedy"],
        [f"{ESTIMATOR}=remax", "rollout.n=1", f"{LOSS}=mine.py:shifted", "actor.mask_truncated_completions=true"],
    ],
    ids=str,
)
def test_dummy_groups_match_those_of_the_job(write, settings):
    write(ARGUMENTS)
    assert_accepted(with_metric(config(*settings), "of_extras"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{ESTIMATOR}=mine.py:scaled"], "parameter `scale` .* or set algorithm.adv_estimator_kwargs.scale"),
        (["fusion.policy=mine.py:later"], r"takes \(view, patience\) instead of .* or set fusion.policy_kwargs"),
        (["actor.loss_mode_kwargs.shift=1"], "actor.loss_mode=vanilla takes no arguments; remove them"),
        ([*PASSED[:2], "algorithm.adv_estimator_kwargs.sclae=1"], "`sclae`: mine.py:scaled has no parameter of"),
        ([*PASSED[:2], "algorithm.adv_estimator_kwargs.mask=1"], "`mask`: rlfuse passes it; remove it"),
        (["trainer.metrics_kwargs.count.least=1"], "metrics_kwargs.count: trainer.metrics has no function"),
    ],
)  # fmt: skip
def test_invalid_kwargs_are_refused(write, settings, message):
    write(ARGUMENTS)
    found = config(*settings)
    assert len([each for each in check(found, read_facts(found)) if re.search(message, each)]) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"{ESTIMATOR}=mine.py:failing", r"adv_estimator=mine.py:failing raised KeyError: 'score'"),
        (f"{ESTIMATOR}=mine.py:undefined", "for dummy data it returned advantages that are not finite"),
        (f"{LOSS}=mine.py:detached", "it returned a loss that does not depend on log_probs"),
        ("fusion.policy=mine.py:outside", "the fusion policy mine.py:outside raised NameError: name 'nothing' is not"),
        ("metric=missing", "mine.py:missing: raised KeyError: 'no_such_column'. It was called with dummy"),
    ],
)  # fmt: skip
def test_failure_on_dummy_data_ends_the_job_with_the_frames_of_the_function(write, setting, message):
    write(ARGUMENTS)
    metric = setting.startswith("metric")
    found = with_metric(config(), "missing") if metric else config(setting)
    with pytest.raises((FunctionError, ConfigError), match=message) as raised:
        try_out(found)
    frames = re.findall(r'File "(.*?)", line \d+, in (\w+)', str(raised.value))
    if "raised" in message:
        assert [(Path(file).name, name) for file, name in frames] == [
            ("mine.py", re.search(r"failing|outside|missing", message)[0])
        ]
    assert pickle.loads(pickle.dumps(raised.value)).args == raised.value.args


def policy_problems(value):
    found = config(f"fusion.policy={value}")
    return [each for each in check(found, read_facts(found)) if each.startswith("fusion.policy=")]


def test_policy_may_be_a_partial_or_an_imported_name(write):
    write("import functools\nfrom functools import partial as other\ndef f(t, view): ...\n"
          "made = functools.partial(f, 1)\ndef g(view, t=2): ...\n")  # fmt: skip
    assert not [problem for name in ("made", "other", "g") for problem in policy_problems(f"mine.py:{name}")]


def test_all_problems_are_reported_at_once_without_running_the_files(write, capsys):
    write("print('run')\ndef f(): ...\n")
    assert len(reported(f"{ESTIMATOR}=mine.py:a", f"{LOSS}=mine.py:b", "actor.kl_loss_type=mine.py:c")) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("returned", ["scores", "[1.0]", "(mask, None)"])
def test_results_that_are_no_matrix_are_reported_with_key_and_shape(write, returned):
    write(f"def f(scores, mask): return {returned}")
    Experience(config(f"{ESTIMATOR}=grpo")).prepare(prepared := groups([[1.0], [0.0]], [[3], [2]]))
    with pytest.raises(ConfigError, match=r"adv_estimator=mine.py:f: returned a .*it must return .*\[2, 3\]"):
        Experience(config(f"{ESTIMATOR}=mine.py:f")).complete(prepared)


def test_running_job_keeps_its_functions_when_the_file_is_edited(write):
    write("def f(mask): return 1.0 * mask")
    batch, running = groups([[1.0]], [[3]]), Experience(config(f"{ESTIMATOR}=mine.py:f"))
    advantages_of(running, batch, [0])
    write("def f(mask): return 2.0 * mask")
    assert advantages_of(running, batch, [0]) == [1.0]
    advantages_of(Experience(running.config), batch, [0])
    assert batch[0].samples[0].tensors["advantages"].tolist() == [2.0] * 3


def test_workers_find_the_files_from_another_working_directory(example, tmp_path_factory, monkeypatch):
    local = with_local_paths(config(*example, "trainer.resume_mode=disable"))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert all(Path(value_of(local, key).partition(":")[0]).is_absolute() for key in PARAMETERS)
    assert traits_of(local.algorithm.adv_estimator).needs_groups
    assert LOSS_MODES.find(local.actor.loss_mode).__name__ == "one_sided"
    assert re.fullmatch(r"run-best_of_others-[\d-]+", with_run_name(local).trainer.experiment_name)


def test_changing_to_or_from_an_estimator_with_critic_is_refused_on_resume(write):
    write(CRITIC + "def plain(mask): ...\n")
    effects = {}
    for was, now in (("gae", "mine.py:above_value"), ("gae", "mine.py:plain"), ("grpo", "mine.py:plain"),
                     ("mine.py:above_value", "grpo")):  # fmt: skip
        (change,) = differences(*({"algorithm": {"adv_estimator": each}} for each in (was, now)))
        effects[was, now] = change.effect
    assert list(effects.values()) == [Effect.EXPERIMENT, Effect.FIXED, Effect.EXPERIMENT, Effect.FIXED]


def test_every_accepted_parameter_is_passed(write):
    lines = ["from rlfuse.algorithms.registry import advantage_estimator"]
    for name, key, result in (
        ("e", ESTIMATOR, "0.0 * mask"),
        ("p", LOSS, "log_probs"),
        ("k", KL_KINDS.key, "log_probs"),
    ):
        traits = "needs_critic=True, needs_baseline=True, needs_reference=True, each_reward=True"
        decorator = f"@advantage_estimator({traits})\n" * (key == ESTIMATOR)
        lines.append(f"{decorator}def {name}({', '.join(PARAMETERS[key])}): return {result}")
    write("\n".join(lines))
    named_in_job = (f"{ESTIMATOR}=mine.py:e", f"{LOSS}=mine.py:p", "actor.kl_loss_type=mine.py:k")
    assert not reported(*named_in_job)
    advantages_of(Experience(config(*named_in_job)), groups([[1.0], [0.0]], [[3], [2]]), [0, 1])
    one, mask = torch.ones(1, 2), torch.tensor([[True, False]])
    options = {"tau_pos": 1.0, "tau_neg": 1.0, "ppo_kl_coef": 1.0}
    assert policy_loss(2 * one, one, one, mask, 0.2, 0.2, None, "mine.py:p", **options)[0].tolist() == [[2.0, 0.0]]
    assert torch.equal(kl_estimate(2 * one, one, "mine.py:k", "actor.kl_loss_type"), 2 * one)


@pytest.mark.parametrize("registry", [ESTIMATORS, LOSS_MODES, KL_KINDS], ids=lambda registry: registry.key)
def test_built_in_functions_use_the_parameters_of_custom_functions(registry: Registry):
    for name, function in registry.items():
        assert set(parameters(function)) - {"selected"} <= set(PARAMETERS[registry.key]), name  # only two losses
    if registry is ESTIMATORS:
        assert ESTIMATORS.keys() == estimators.ESTIMATORS.keys()
        for name, traits in estimators.ESTIMATORS.items():
            used = set(parameters(ESTIMATORS[name]))
            assert (traits.needs_critic, traits.needs_groups) == ("values" in used, "groups" in used), name
            assert (traits.each_reward, traits.needs_reference) == ("dimensions" in used, "ref_log_probs" in used)
            assert traits.needs_baseline == ("baselines" in used), name
            read = {"scores", "token_rewards", "dimensions"} & used
            assert traits.needs_rewards == bool(read), name
