"""`rlfuse completion bash|zsh|fish`: print a completion script of a shell.

At each TAB the script calls `rlfuse completion candidates WORD ...`, which prints one `candidate<TAB>description` per
line for the last word. Invariant: imports neither Hydra nor torch, so that the answer takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlfuse.cli import COMMANDS
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
        description="Print a script for tab completion of commands, keys, presets, values and files.",
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
    takes_job = command in JOB_COMMANDS or before == ["reward", "replay"]
    if takes_job and "=" in word:
        yield from _values(word)
    elif command not in ("completion", "prepare"):
        yield from _settings(word) if takes_job else ()
        yield from _files(word, (".yaml", ".yml") if command in ("train", "plan", "submit") else ())


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
