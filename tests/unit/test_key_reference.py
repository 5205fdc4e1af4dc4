"""conf/KEYS.md is current; help texts, error messages and code use the same valid values of each key."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlfuse.algorithms import advantages, kl, losses
from rlfuse.config.checks import check
from rlfuse.config.declare import CUSTOM
from rlfuse.config.documentation import by_name, help_text, keys
from rlfuse.config.facts import Facts
from rlfuse.config.rewards import KEYS
from rlfuse.config.schema import Config
from rlfuse.fusion.policies import POLICIES
from rlfuse.fusion.selection import LABELS
from rlfuse.run.resume.changes import differences

CONF = Path(__file__).parents[2] / "conf"
RENEW = "rlfuse train --help --markdown > conf/KEYS.md"
PRINT = """if True:
    import sys, time
    from rlfuse.cli import main
    status = main(["train", "--help", *sys.argv[1:]])
    heavy = {"torch", "transformers", "ray", "vllm", "deepspeed"} & sys.modules.keys()
    print(heavy or "nothing", time.process_time(), file=sys.stderr)
    sys.exit(status)"""
OTHER = {"bool": True, "int": 7, "float": 0.125, "str": "other", "list": ["other"], "dict": {"other": 1}}


def printed(*words):
    return subprocess.run([sys.executable, "-c", PRINT, *words], capture_output=True, text=True, check=True)


def rows(page):
    """Return {key: other cells of its row}."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace(r"\|", "|") for cell in line] for line in lines]
    return {name.strip("`"): rest for name, *rest in cells}


def named(words):
    """Return the names in `a | b (meaning)` in order, without the placeholder of custom functions."""
    found = re.sub(r" \([^|]*\)", "", words).replace("`", "").removeprefix("a list of ").split(" | ")
    return [name for name in found if name != CUSTOM]


def changed(name, value):
    """Return a valid configuration with this value."""
    config = Config()
    config.data.train_files, config.model.path, config.reward.functions = ["a.parquet"], "model", ["a.py:f"]
    *path, leaf = name.split(".")
    node = config
    for part in path:
        node = getattr(node, part)
    setattr(node, leaf, value)
    return config


@pytest.mark.slow
def test_reference_is_current_and_printed_quickly():
    page = printed("--markdown")
    assert page.stdout == (CONF / "KEYS.md").read_text(), f"conf/KEYS.md is not current; renew it: {RENEW}"
    heavy, seconds = page.stderr.split()[-2:]
    assert heavy == "nothing" and float(seconds) < 5


@pytest.mark.slow
def test_every_key_has_a_complete_row():
    table = rows((CONF / "KEYS.md").read_text())
    assert set(table) == {*by_name(), *(f"reward.functions[].{name}" for name in KEYS)}
    for name, key in by_name().items():
        valid, default, meaning, change = table[name]
        assert key.range in valid and key.unit in valid and ("null" in valid) == (key.type.endswith("| None"))
        assert default == ("required" if key.required else f"`{key.default_text}`") and meaning
        other = OTHER[next(kind for kind in OTHER if key.type.startswith(kind))]
        other = not other if other is key.default else other
        start = changed(name, key.default)
        (found,) = differences(dataclasses.asdict(start), dataclasses.asdict(changed(name, other)))
        assert f"{found.effect.name.lower().replace('_', ' ')} ({found.resume.reason})" in change
    assert "fixed (adds or removes the critic" in table["algorithm.adv_estimator"][-1]
    assert "next step (when and where work runs" in table["trainer.nnodes"][-1]


@pytest.mark.parametrize("name", [key.name for key in keys() if key.choices])
def test_error_help_and_reference_list_the_accepted_values(name):
    wrong = ["unheard"] if by_name()[name].type.startswith("list") else "unheard"
    (problem,) = [each for each in check(changed(name, wrong), Facts()) if each.startswith(f"{name}=")]
    refused = re.search(r"is not one of ([\w, -]+)", problem)[1].split(", ")
    accepted = list(by_name()[name].names) + ["null"] * by_name()[name].optional
    assert refused == named(rows((CONF / "KEYS.md").read_text())[name][0]) == accepted
    for value in (None if word == "null" else word for word in refused):
        problems = check(changed(name, [value] if isinstance(wrong, list) else value), Facts())
        assert not any("is not one of" in each for each in problems)
    shown = " ".join(help_text([by_name()[name]]).split())
    assert all(re.search(rf"(?<![\w-]){value}(?![\w-])", shown.partition(f"{name}: ")[2]) for value in refused)


@pytest.mark.parametrize("name", [key.name for key in keys() if key.custom and key.choices])
def test_error_help_and_reference_mention_custom_functions(name):
    (problem,) = [each for each in check(changed(name, "unheard"), Facts()) if each.startswith(f"{name}=")]
    assert f"or {CUSTOM} for a custom one" in problem
    assert f"| {CUSTOM} (custom)" in help_text([by_name()[name]]).replace("\n      ", " ")
    assert f"| `{CUSTOM}` (custom)" in rows((CONF / "KEYS.md").read_text())[name][0]
    assert not any(each.startswith(f"{name}=") for each in check(changed(name, "mine.py:f"), Facts()))


def test_every_named_value_is_implemented():
    tables = {
        "algorithm.adv_estimator": advantages.ESTIMATORS,
        "algorithm.kl_penalty": kl.KL_KINDS,
        "actor.kl_loss_type": kl.KL_KINDS,
        "actor.loss_mode": losses.LOSS_MODES,
        "actor.loss_agg_mode": losses.AGG_MODES,
        "fusion.policy": POLICIES,
        "fusion.data": LABELS,
    }
    assert {name: set(by_name()[name].names) for name in tables} == {name: set(table) for name, table in tables.items()}
