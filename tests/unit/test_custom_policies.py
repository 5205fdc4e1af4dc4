"""Custom fusion policies: the README's example, registration, and error messages for invalid decisions."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from transformers import Qwen2Config
from worlds.playing import play
from worlds.scenes import Scene, scenes

from rlfuse.cli import main
from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError, FunctionError
from rlfuse.fusion.custom_policies import CheckedPolicy, load_policy
from rlfuse.fusion.decisions import Traits, traits_of
from rlfuse.fusion.policies import POLICIES
from rlfuse.run.build import _attempt
from rlfuse.run.job import Job
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.tuning import tune
from rlfuse.simulate.workload import EXAMPLE, parse
from rlfuse.tasks.remainder import write_parquet
from rlfuse.tasks.vocabulary import build_tokenizer

README = Path(__file__).resolve().parents[2] / "rlfuse/fusion/README.md"
SMALL = parse(EXAMPLE | {"slots": 3, "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 300,
                                                         "count": 48}})  # fmt: skip
exploring = settings(deadline=None, derandomize=True, max_examples=8)


@pytest.fixture(scope="module")
def readme_policy(tmp_path_factory):
    """Return the name path/file.py:function of the README's policy."""
    path = tmp_path_factory.mktemp("policy") / "mine.py"
    path.write_text(re.search(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)[1])
    return f"{path}:half_and_half"


def play_with_policy(policy, scene):
    """Play a scene with this policy; scenes refer to policies by name in `POLICIES`."""
    with patch.dict(POLICIES, {"own": policy}):
        return play(replace(scene, policy="own"))


def write_policy(folder, body, top=""):
    """Write a policy with this body and return its name."""
    path = folder / "policy.py"
    helpers = "from rlfuse.fusion.decisions import *\nfrom rlfuse.fusion.policies import *\n"
    path.write_text(f"{helpers}from rlfuse.fusion.assignment import *\n{top}\ndef mine(view):\n    {body}\n")
    return f"{path}:mine"


# The README's example ------------------------------------------------------------------------------------------------


def trained_samples(run):
    """Return (response length of each sample, model -> samples of each optimizer step)."""
    lengths = {span.samples[0]: span.tokens for span in run.spans if span.kind == "generate"}
    steps, open_ = defaultdict(list), defaultdict(set)
    for span in sorted(run.spans, key=lambda span: span.end):
        model = span.attributes.get("model")
        if span.kind == "backward":
            open_[model] |= set(span.samples)
        elif span.kind == "optimizer" and span.where == "trainer/0":
            steps[model].append(open_.pop(model))
    return lengths, dict(steps)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"failures": [{"slot": 3, "at_s": 2.0}]}], ids=["example", "a lost engine"])
def test_the_example_has_the_samples_and_mini_batches_of_serial(readme_policy, more):
    workload = parse(EXAMPLE | more)
    serial, custom = simulate(workload, "serial"), simulate(workload, readme_policy)
    assert custom.result.policy == readme_policy
    lengths, steps = trained_samples(custom)
    assert (lengths, steps) == trained_samples(serial)
    assert len(lengths) == 256 and {model: len(each) for model, each in steps.items()} == {"actor": 4}
    assert custom.result.step_s < serial.result.step_s


@pytest.mark.slow
@exploring
@given(scene=scenes())
def test_each_sample_is_trained_on_once_in_any_order_and_with_failures(readme_policy, scene):
    assert len(play_with_policy(load_policy(readme_policy), scene).learned) == 1


@pytest.mark.slow
@exploring
@given(scene=scenes(steps=2, reference=True, estimator="grpo"))
def test_pipelines_that_score_in_their_bubbles_are_valid(readme_policy, scene):
    pipelined = replace(scene.settings, lockstep=True, lockstep_backward=True, pipelined=True)
    assert len(play_with_policy(load_policy(readme_policy), replace(scene, settings=pipelined)).learned) == 2


@pytest.mark.slow
def test_the_command_lists_a_custom_policy_next_to_built_in_ones(readme_policy, tmp_path, capsys):
    (tmp_path / "workload.json").write_text(json.dumps(EXAMPLE))
    arguments = [
        str(tmp_path / "workload.json"),
        "--policy",
        "serial",
        readme_policy,
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert main(["simulate", *arguments]) == 0
    assert [result["policy"] for result in json.loads((tmp_path / "out.json").read_text())] == ["serial", readme_policy]
    lines = capsys.readouterr().out.splitlines()  # an import may print lines first
    start = lines.index(next(line for line in lines if line.startswith("policy ")))
    head, *rows = lines[start : start + 3]
    assert len(rows) == 2 and all(len(row) == len(head) for row in rows) and rows[1].startswith(f"{readme_policy}  ")


# The registry --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_custom_policy_may_declare_traits_and_is_tuned(tmp_path):
    top = (
        'from rlfuse.fusion.decisions import fusion_policy\n@fusion_policy(tuned=("threshold", "max_decode_slowdown"))'
    )
    name = write_policy(tmp_path, "return rlhfuse(view)", top)
    assert traits_of(load_policy(name)) == Traits(("threshold", "max_decode_slowdown"))
    assert name not in POLICIES and "mine" not in POLICIES
    assert tune(SMALL, name) == tune(SMALL, "rlhfuse")
    with pytest.raises(FunctionError, match=r"tuned=\['treshold'\]: not tunable settings; use threshold"):
        load_policy(write_policy(tmp_path, "return []", top.replace('"thr', '"tr')))


@pytest.mark.slow
def test_an_edited_file_changes_new_runs_but_not_the_loaded_policy(tmp_path):
    top = 'from rlfuse.fusion.decisions import fusion_policy\n@fusion_policy(tuned=("threshold",))'
    name = write_policy(tmp_path, "return rlhfuse(view)", top)
    load_policy(name)
    before = tune(SMALL, name)
    write_policy(tmp_path, "return oh no")
    assert tune(SMALL, name) == before
    with pytest.raises(FunctionError, match="SyntaxError"):
        simulate(SMALL, name)


# The name ------------------------------------------------------------------------------------------------------------


def test_the_key_accepts_a_file_and_reports_the_required_form():
    def problems(value):
        config = Config()
        config.fusion.policy = value
        return [problem for problem in check(config, Facts()) if problem.startswith("fusion.policy")]

    assert problems("mine.py:half_and_half") == problems("stream") == []
    for wrong in ("mine.py", "mine:f", "mine.py:", "mine.py:half and half"):
        assert problems(wrong) == [
            f"fusion.policy={wrong}: `{wrong}` is not one of serial, stream, rlhfuse, adaptive; or "
            "path/file.py:name for a custom one"
        ]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "nothing.py:f", "the file .*nothing.py does not exist; correct the path"),
        ("def good(view): ...\nbad = 1", "mine.py:f", "the file has no function `f`; its functions: good"),
        ("f = 1", "mine.py:f", "not a function; a policy is `def name.snapshot.`"),
        ("class f: ...", "mine.py:f", "not a function"),
        ("async def f(view): ...", "mine.py:f", "the function is async"),
        ("def f(): ...", "mine.py:f", r"takes \(\) instead of one snapshot"),
        ("def f(view, costs): ...", "mine.py:f", r"takes \(view, costs\) instead of one snapshot"),
        ("def f(view) ...", "mine.py:f", "syntax error in line 1"),
        ("import nothing_at_all\ndef f(view): ...", "mine.py:f", "Python does not find the package `nothing_at_all`"),
        ("raise SystemExit(3)\ndef f(view): ...", "mine.py:f", "its file can't be executed: SystemExit: 3"),
        ("", "adaptve", "unknown policy; did you mean adaptive"),
        (
            "",
            "half",
            "unknown policy; policies: serial, stream, rlhfuse, adaptive, or path/file.py:name for a custom policy",
        ),
    ],
)
def test_an_invalid_name_is_reported_with_valid_ones(text, name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(text or "")
    Path("workload.json").write_text(json.dumps(EXAMPLE))
    with pytest.raises(FunctionError, match=f"^fusion.policy={name}: .*{message}"):
        load_policy(name)
    assert main(["simulate", "workload.json", "--policy", name]) == 2
    assert re.search(f"--policy {name}: .*{message}", capsys.readouterr().err)


def test_a_job_with_a_missing_policy_does_not_start(tmp_path):
    config, (train, held_out) = Config(), write_parquet(tmp_path, 8, 2, seed=1)
    config.model.path, config.fusion.policy = str(tmp_path / "model"), f"{tmp_path}/nothing.py:f"
    config.data.train_files, config.data.val_files, config.data.train_batch_size = [str(train)], [str(held_out)], 4
    config.reward.functions = [f"{tmp_path}/nothing_either.py:f"]
    build_tokenizer().save_pretrained(tmp_path / "model")
    Qwen2Config(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    job = Job(config, tmp_path / "run", None, {"step": 0}, 0.0)
    with pytest.raises(ConfigError, match=r"(?s)1. fusion.policy=.*nothing.py does not exist.*2. .*nothing_either.py"):
        _attempt(job, None)
    assert not (tmp_path / "run").exists()


# What it decides -----------------------------------------------------------------------------------------------------

WRONG = {
    "return None": "returned a NoneType; a policy returns a list of decisions",
    "return 1 / 0": r"raised ZeroDivisionError: division by zero\n(.*\n)*.*policy.py., line 6",
    "return []": r"no decision while nothing is running. Possible decisions: Generate groups 0, 1, 2, 3, 4, 5 \(idle",
    "return ['go']": "'go' cannot be executed: a str is not a decision; valid types: Generate, Move, Switch, Score",
    "return [Generate(7, (0,))]": r"Generate\(slot=7, groups=\(0,\)\) cannot be executed: there is no slot 7; valid: "
    "0 to 2",
    "return [Generate(0, (9,))]": "group 9 is not waiting for this; valid: 0, 1, 2, 3, 4, 5",
    "return [Generate(0, (0,)), Generate(1, (0,))]": "group 0 appears twice",
    "return [Generate(0, view.waiting)]": "a tuple with at least one group is required; valid: 0, 1",
    "return [Generate(0, ())]": "a tuple with at least one group is required",
    "return [Generate('0', (0,))]": "there is no slot 0; valid: 0 to 2",
    "return [Switch(1, 'trainer'), Generate(1, (0,))]": "slot 1 was given other work in the same list",
    "return [Generate(1, (0,)), Switch(1, 'trainer')]": "slot 1 was given other work in the same list",
    "return [Switch(0, 'rollout')]": "slot 0 already has that role",
    "return [Switch(0, 'judge')]": "there is no role 'judge'; valid: rollout, trainer",
    "return admit(view) + [Move(('x',), 0, 1)]": "sample 'x' is not waiting for this; valid: none",
    "return admit(view) or [Move(tuple(view.slots[0].samples), 0, 0)]": "source and target are the same slot",
    "return admit(view) or [Move(tuple(view.slots[0].samples), 0, 1, 'usb')]": "carry='usb'; valid: kv, tokens",
    "return admit(view) or [Switch(0, 'trainer')]": "slot 0 is not an engine without samples; slots that are: none",
    "return [Score('reward', ('x',))]": "sample 'x' is not waiting for this; valid: none",
    "return [Score('taste', ('x',))]": "there is no kind of scoring 'taste'; valid: ",
    "return [Score('ref', ('x',), 0)]": "slot 0 is not an idle trainer; slots that are: none",
    "return [Score('ref', ('x',))]": "a slot is required; idle trainers: none",
    "return [Score('ref', ('x',), 0, ('taste',))]": "there is no kind of scoring 'taste'; valid: ",
    "return [Score('ref', ('x',), 0, 'values')]": "also='values': must be a tuple",
    "return [Score('ref', ('x',), 0, ('reward',))]": "rewards are scored in separate calls",
    "return [Accumulate('actor', ('x',), 0, ('teacher',))]": "there is no model 'teacher' to train; models: actor",
    "return [Score('ref', tuple(names), s, ('ref',)) for s in view.idle_trainers if (names := view.unscored['ref'])]"
    " or serial(view)": "sample '.*' appears twice in the same list",
    "return [Accumulate('actor', ('x',), 0)]": "slot 0 is not an idle trainer",
    "return [Accumulate('teacher', ('x',), 0)]": "there is no model 'teacher' to train; models: actor",
    "return [Train({'actor': ('x',)})]": "the models are not pipelined: return Accumulate instead",
    "return [OptimizerStep('actor')]": "'actor' is not ready for its optimizer step; models that are: none",
    "return [OptimizerStep({})]": "is not ready for its optimizer step",
    "return [Accumulate([], ('x',), 0)]": "cannot be executed: unhashable type",
    "return serial(view) if view.waiting else [d for d in serial(view) if not isinstance(d, OptimizerStep)]": "returned"
    r" no decision while nothing is running. Possible decisions: OptimizerStep of the actor \(idle engines none, idle ",
    "return [Switch(s, 'trainer') for s in view.idle_engines] + "
    "[Switch(s, 'rollout') for s in view.idle_trainers]": "switched slots and moved samples [0-9]+ times without "
    "finishing a sample or starting other work. Possible decisions: Generat",
    "return admit(view) or [Move(names, slot, (slot + 1) % 3) for slot, names in ("
    "(s.index, tuple(n for n, e in s.samples.items() if e.state == 'generating')) for s in view.slots) if names]": (
        "switched slots and moved samples"
    ),
}


@pytest.mark.parametrize("body", WRONG)
def test_invalid_decisions_are_reported_without_a_hang(body, tmp_path):
    name = write_policy(tmp_path, body)
    with pytest.raises(FunctionError, match=WRONG[body]) as refused:
        simulate(SMALL, name)
    assert str(refused.value).startswith(f"the fusion policy {name} ")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return [Generate(1, (0,))]", "slot 1 is drained; slots that can generate: 0, 2"),
        ("return admit(view) or [Move(tuple(view.slots[0].samples), 0, 1)]", "slot 1 is drained; slots that can gen"),
        (
            "return serial(view) if view.unfinished or not view.all_ranks_idle else [Score('old_log_prob', tuple("
            "view.unscored['old_log_prob']), 1)]",
            "slot 1 is not an idle trainer, as it is drained; slots that are: 0, 2",
        ),
    ],
)
def test_decisions_for_a_drained_slot_are_refused(body, why, tmp_path):
    name = write_policy(tmp_path, body)
    with pytest.RaisesGroup(pytest.RaisesExc(FunctionError, match=why)) as refused:
        play_with_policy(load_policy(name), Scene("serial", slots=3, drained=(1,)))
    assert str(refused.value.exceptions[0]).startswith(f"the fusion policy {name} ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "adaptive" else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
@exploring
@given(scene=scenes(steps=2))
def test_decisions_of_built_in_policies_are_valid(name, scene):
    reading = CheckedPolicy(POLICIES[name], name, {})
    assert len(play_with_policy(reading, scene).learned) == 2
    pipelined = replace(scene.settings, lockstep=True, lockstep_backward=True, pipelined=True)
    assert len(play_with_policy(reading, replace(scene, settings=pipelined)).learned) == 2
