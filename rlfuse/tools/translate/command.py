"""`rlfuse translate FILE | - | -- WORDS`: translate a command of verl, TRL or OpenRLHF into a job file.

Nothing is dropped silently. Keys that the command does not set get the framework's default, and keys that the user must
decide are `???`. Scripts are not executed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.errors import ConfigError
from rlfuse.parsing import parse_yaml
from rlfuse.tools.translate import openrlhf, trl, verl
from rlfuse.tools.translate.arguments import SETTING, Command
from rlfuse.tools.translate.job import Translation
from rlfuse.tools.translate.shell import Script, Word
from rlfuse.tools.translate.trl_script import read_script

USAGE = """\
Convert a command of verl, TRL or OpenRLHF to a job file on stdout:
  rlfuse translate run_qwen2-7b_grpo.sh > my_job.yaml      a script with one such command (not executed)
  rlfuse translate train_grpo.py > my_job.yaml             a Python script that calls a trainer of TRL (not executed)
  rlfuse translate ppo_trainer.yaml > my_job.yaml          a config file of verl, or of the TRL CLI
  rlfuse translate -- python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo ...
  rlfuse translate -- trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B ...
  rlfuse translate -- python3 -m openrlhf.cli.train_ppo_ray --pretrain ...
  ... | rlfuse translate - > my_job.yaml                   a script or config file from stdin
Keys with ??? are to be decided: rlfuse has no equal, and their comments say why. Write a value for each, then run:
rlfuse plan my_job.yaml; rlfuse train my_job.yaml
"""
VERL = re.compile(r"^(?:\S*[./])?main_\w+?(?:\.py)?$")
OPENRLHF = re.compile(r"openrlhf[./]cli[./]train_\w+?(?:\.py)?$")
FORMS = "verl.trainer.main_ppo KEY=VALUE ..., trl grpo --FLAG ..., or openrlhf.cli.train_ppo_ray --FLAG ..."
ENVIRONMENT = ("WANDB_MODE", "WANDB_PROJECT")


def read(arguments: list[str]) -> Command:
    """Read the command from a file, stdin or words after `--`. Raises ConfigError if there is none."""
    if arguments[0] == "--":
        return _parse_words("words", [Word(text) for text in arguments[1:]], {})
    if len(arguments) > 1 or "=" in arguments[0]:
        raise ConfigError([f"{' '.join(arguments)}: pass one file, or put the words of a command line after --"])
    name = arguments[0]
    try:
        text = sys.stdin.read() if name == "-" else Path(os.path.expanduser(name)).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{name}: the file does not exist; correct the path"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{name}: can't be read ({error})"]) from error
    origin = "stdin" if name == "-" else Path(name).name
    if name.endswith((".yaml", ".yml")):
        return _parse_yaml(origin, text)
    if name.endswith(".py"):
        return read_script(Command("TRL", origin), text)
    script = Script()
    found = [(words, _environment(script)) for words in script.commands(text) if _framework(words)]
    if len(found) == 1:
        return _parse_words(origin, *found[0])
    if name == "-" and not found:
        return _parse_yaml(origin, text)
    problem = f"it has {len(found)} commands that start training" if found else "it has no command that starts training"
    raise ConfigError([f"{name}: {problem} ({FORMS}); put the words of one command after --"])


def _environment(script: Script) -> dict[str, str]:
    given = {name: script.values[name] for name in ENVIRONMENT if script.values.get(name)}
    return {name: words[0].text for name, words in given.items() if not words[0].unknown}


def _framework(words: Sequence[Word]) -> str:
    """Return the framework that a command starts, or an empty string."""
    texts = [word.text for word in words]
    if any(VERL.search(text) and "=" not in text for text in texts):
        return "verl"
    if any(OPENRLHF.search(text) and "=" not in text for text in texts):
        return "OpenRLHF"
    return "TRL" if trl.program_at(words) is not None else ""


def _parse_words(origin: str, words: list[Word], environment: dict[str, str]) -> Command:
    assigned = [found for word in words if (found := SETTING.fullmatch(word.text)) and found[1] in ENVIRONMENT]
    command = Command(
        _framework(words) or "verl", origin, environment=environment | {each[1]: each[2] for each in assigned}
    )
    if command.framework == "TRL":
        trl.read_words(command, words)
    else:
        form = VERL if command.framework == "verl" else OPENRLHF
        at = next((at for at, word in enumerate(words) if form.search(word.text) and "=" not in word.text), -1)
        name = words[at].text.removesuffix(".py").replace("/", ".") if at >= 0 else ""
        command.program = name if command.framework == "verl" else name.rpartition(".")[2]
        (command.read_settings if command.framework == "verl" else command.read_flags)(words[at + 1 :])
    if not command.settings and not command.unknown:
        raise ConfigError([f"{origin}: no settings found; write a command as {FORMS}"])
    return command


def _parse_yaml(origin: str, text: str) -> Command:
    try:
        content = parse_yaml(text, OmegaConf.create)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([f"{origin}: it is not valid YAML: {' '.join(str(error).split())[:300]}"]) from error
    if not isinstance(content, DictConfig):
        raise ConfigError([f"{origin}: it has no keys; a verl config has data, actor_rollout_ref and trainer"])
    if "model_name_or_path" in content:
        return trl.read_config(Command("TRL", origin), content)
    command = Command("verl", origin)
    if "defaults" in content:
        command.unread["defaults"] = "the listed files are not read; add the settings that differ from verl's defaults"
    command.read_tree(content)
    return command


def translate(command: Command) -> Translation:
    """Translate a command to the equivalent job."""
    return {"verl": verl, "TRL": trl, "OpenRLHF": openrlhf}[command.framework].translate(command)


def main(argv: list[str]) -> None:
    """Run the command: print the job file."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    command = read(argv)
    print(translate(command).as_text(command.origin), end="")
