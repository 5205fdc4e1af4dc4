"""`rlfuse completion bash|zsh|fish`: print a completion script of a shell.

At each TAB the script calls `rlfuse completion candidates WORD ...`, which prints one `candidate<TAB>description` per
line for the last word. Invariant: imports neither Hydra nor torch, so that the answer takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlfuse.cli import COMMANDS, MODULES
from rlfuse.config.declare import Key
from rlfuse.config.documentation import by_name, groups
from rlfuse.config.prepared import FOLDERS

PRESETS = Path(__file__).parent / "conf"
JOB_COMMANDS = ("train", "eval", "generate", "plan", "submit")
"""Commands that take a job file and settings."""
ACTIONS = {
    "prepare": tuple(FOLDERS),
    "submit": ("status", "logs", "stop"),
    "runs": ("clean",),
    "slots": ("drain", "restore", "leave"),
    "reward": ("replay",),
    "completion": ("bash", "fish", "zsh"),
}
"""Command -> words that may follow it."""
TRAIN_OPTIONS = {
    "--multirun": "a sweep: one job for each combination of values",
    "--cfg": "print the composed job without running it: job | hydra | all",
    "--resolve": "with --cfg: resolve references",
    "--info": "print the files and presets of the job",
    "--config-dir": "folder with custom presets",
    "--config-name": "job file in --config-dir",
    "--json-schema": "with --help: print the JSON schema of a job file",
}
PARSERS = {
    "runs clean": "tools/listing.py:clean",
    **{f"submit {action}": "tools/submission.py:_job_parser" for action in ACTIONS["submit"]},
    **dict.fromkeys(("slots", "slots restore", "slots leave", "completion"), ""),
    "slots drain": "tools/slots.py:main",
    "plan --search": "tools/planning/search_command.py:main",
}
"""Command with an action -> function that adds its options, if not `main` of the command's file; empty: none."""
ADDS_OPTIONS = re.compile(r"_?(\w+_)?parser|_?add_\w+")
"""Names of functions that add options for others."""
SCRIPTS = {
    "bash": """\
# eval "$(rlfuse completion bash)" in ~/.bashrc
_rlfuse() {
    local line=${COMP_LINE:0:COMP_POINT} words word candidate
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[-1]}
    COMPREPLY=()
    while IFS=$'\\t' read -r candidate _; do
        # Readline replaces only the text after the last word break.
        [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && candidate=${candidate#"${word%"${word##*=}"}"}
        COMPREPLY+=("$candidate")
    done < <("${words[0]}" completion candidates "${words[@]:1}" 2> /dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -F _rlfuse rlfuse
""",
    "zsh": """\
#compdef rlfuse
# eval "$(rlfuse completion zsh)" in ~/.zshrc after compinit, or write it to a file _rlfuse in a folder of $fpath
_rlfuse() {
    local candidate text shown
    local -a complete complete_texts partial partial_texts
    while IFS=$'\\t' read -r candidate text; do
        shown="$candidate${text:+  -- $text}"
        if [[ $candidate == *[=./] ]]; then
            partial+=("$candidate") partial_texts+=("${shown[1,COLUMNS-1]}")
        else
            complete+=("$candidate") complete_texts+=("${shown[1,COLUMNS-1]}")
        fi
    done < <("${words[1]}" completion candidates "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2> /dev/null)
    compadd -l -d partial_texts -S '' -a partial
    compadd -l -d complete_texts -a complete
}
if [[ $funcstack[1] == _rlfuse ]]; then _rlfuse "$@"; else compdef _rlfuse rlfuse; fi
""",
    "fish": """\
# rlfuse completion fish > ~/.config/fish/completions/rlfuse.fish
function __rlfuse_candidates
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    $words[1] completion candidates $words[2..] (commandline --current-token --cut-at-cursor) 2> /dev/null
end
complete --command rlfuse --no-files --arguments '(__rlfuse_candidates)'
""",
}


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    if argv[:1] == ["candidates"]:
        for candidate, text in candidates(argv[1:]):
            print(f"{candidate}\t{text}" if text else candidate)
        return
    parser = argparse.ArgumentParser(
        prog="rlfuse completion",
        description="Print a script for tab completion of commands, options, keys, presets, values and files.",
        epilog='for bash add to ~/.bashrc: eval "$(rlfuse completion bash)"',
    )
    parser.add_argument("shell", choices=SCRIPTS)
    print(SCRIPTS[parser.parse_args(argv).shell], end="")


def candidates(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (candidate, description) for the last of `words`, the possibly incomplete arguments of `rlfuse`."""
    *before, word = words or [""]
    found = _commands() if not before else _arguments(before, word)
    return sorted({text: about for text, about in found if text.startswith(word)}.items())


def _commands() -> Iterator[tuple[str, str]]:
    yield from COMMANDS.items()
    yield from (("--help", "list the commands"), ("--version", "versions of rlfuse and its main dependencies"))


def _arguments(before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    command = before[0]
    if len(before) == 1:
        yield from ((action, "") for action in ACTIONS.get(command, ()))
    takes_job = command in JOB_COMMANDS or list(before[:2]) == ["reward", "replay"]
    if word.startswith("-"):
        yield from _options(before)
    elif takes_job and "=" in word:
        yield from _values(word)
    elif command not in ("completion", "prepare"):
        yield from _settings(word) if takes_job else ()
        yield from _files(word, (".yaml", ".yml") if command in ("train", "plan", "submit") else ())


def _options(before: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command. They are read from its source, since its modules import large libraries."""
    command = before[0]
    if command not in COMMANDS:
        return
    yield "--help", "show the usage"
    if command == "train":
        yield from TRAIN_OPTIONS.items()
        return
    named = (f"{command} {each}" for each in before[1:])
    adds = PARSERS.get(next((each for each in named if each in PARSERS), command), f"{_file_of(MODULES[command])}:main")
    if adds:
        yield from _added_options(*adds.split(":"))


def _file_of(module: str) -> str:
    return f"{module.removeprefix('rlfuse.').replace('.', '/')}.py"


def _added_options(file: str, function: str) -> Iterator[tuple[str, str]]:
    """Yield the options that a function adds to a parser, itself or by functions that `ADDS_OPTIONS` names."""
    tree = ast.parse((Path(__file__).parent / file).read_bytes())
    modules = {name.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    for call in (node for each in found for node in ast.walk(each) if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name == "add_argument":
            yield from _added(call)
        elif ADDS_OPTIONS.fullmatch(name) and isinstance(call.func, ast.Name):
            yield from _added_options(_file_of(module) if (module := modules.get(name)) else file, name)


def _added(call: ast.Call) -> Iterator[tuple[str, str]]:
    keywords = {each.arg: each.value for each in call.keywords}
    about = keywords.get("help", ast.Constant(""))
    pieces = about.values if isinstance(about, ast.JoinedStr) else [about]
    text = "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in pieces)
    text = text.replace(" (%(default)s)", "").removeprefix("...")
    is_switch = "BooleanOptionalAction" in ast.unparse(keywords.get("action", ast.Constant("")))
    for option in (str(each.value) for each in call.args if isinstance(each, ast.Constant)):
        if option.startswith("--") and "SUPPRESS" not in ast.unparse(about):
            yield option, text
            if is_switch:
                yield option.replace("--", "--no-", 1), text


def _settings(word: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and groups below the last complete group of `word`, and groups of presets."""
    above = word[: word.rfind(".") + 1]
    inside = {name: text for name, text in groups().items() if name.startswith(above)}
    for name, text in inside.items():
        if "." not in name.removeprefix(above):
            yield f"{name}.", text
    for name, key in by_name().items():
        if name.startswith(above) and "." not in name.removeprefix(above):
            yield f"{name}=", key.doc
    if not above:
        yield from ((f"{group}=", f"presets: {', '.join(_presets(group))}") for group in _preset_groups())


def _values(word: str) -> Iterator[tuple[str, str]]:
    """Yield the values of `KEY=VALUE`, where VALUE may be a list or a sweep of which the last entry is completed."""
    name, given = re.fullmatch(r"([^=]*)=(.*)", word, re.DOTALL).groups()
    entry = re.search(r"[^\[,]*$", given)[0]
    typed, key = word.removesuffix(entry), by_name().get(name)
    if name in _preset_groups():
        found = [(preset, "") for preset in _presets(name)]
    else:
        found = [*_values_of(key, entry)] if key else []
    yield from ((typed + value, text) for value, text in found)


def _values_of(key: Key, entry: str) -> Iterator[tuple[str, str]]:
    for choice in key.choices.split(" | ") if key.choices else ():
        name, _, meaning = choice.partition(" (")
        yield name, meaning.removesuffix(")")
    if key.type.startswith("bool"):
        yield from (("true", ""), ("false", ""))
    if key.optional:
        yield "null", ""
    if key.is_path or key.custom or key.leaf.endswith("path") or key.name == "reward.functions":
        yield from _files(entry, (".py",) if key.custom or key.name == "reward.functions" else ())
    elif not key.required and not key.optional and not key.choices and key.default != "":
        yield key.default_text, "default"


def _files(word: str, endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the folders, and the files with these endings (empty: all), in the folder of an incomplete path."""
    typed, start = word[: word.rfind("/") + 1], word[word.rfind("/") + 1 :]
    try:
        entries = [*os.scandir(os.path.expanduser(typed) or ".")]
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") and not start.startswith("."):
            continue
        if entry.is_dir():
            yield f"{typed}{entry.name}/", ""
        elif entry.name.endswith(endings or ""):
            yield typed + entry.name, ""


def _preset_groups() -> list[str]:
    return sorted(path.name for path in PRESETS.iterdir() if path.is_dir())


def _presets(group: str) -> list[str]:
    return sorted(path.stem for path in (PRESETS / group).glob("*.yaml"))
