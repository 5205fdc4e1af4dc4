"""Links, commands, options, jobs, keys and messages in the documentation are valid."""

import argparse
import ast
import importlib
import json
import re
import shlex
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlfuse.cli import COMMANDS, MODULES
from rlfuse.config.compose import compose_job, read_command, to_config
from rlfuse.config.documentation import by_name, groups
from rlfuse.config.facts import Facts
from rlfuse.config.keys import PRESET_GROUPS, is_free
from rlfuse.config.other_frameworks import VERL, VERL_PREFIXES, counterpart
from rlfuse.tasks.prepare import TASKS
from rlfuse.tools.evaluation.arguments import is_job_argument, split_checkpoint
from rlfuse.tools.translate.command import read, translate
from rlfuse.tools.translate.verl import CONVERSIONS

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "jobs"


def tracked_documents():
    """Return all Markdown files that git does not ignore; without git, those of known folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    folders = ("", "conf/", "jobs/", "rlfuse/engines/", "tests/benchmarks/", "tests/gpu/")
    found = {path.relative_to(ROOT).as_posix() for folder in folders for path in ROOT.glob(f"{folder}*.md")}
    return sorted(name for name in found | {*filter(None, tracked)} if (ROOT / name).exists())


DOCUMENTS = tracked_documents()
OURS = [name for name in DOCUMENTS if name.startswith("jobs/") and name != "jobs/first_day.md"]


def text_of(name):
    return (ROOT / name).read_text()


def split_fences(text):
    """Return the text outside of code fences, and (language, content) of each fence."""
    parts = re.split(r"^```(\w*)(?:\n|\Z)", text, flags=re.MULTILINE)
    return "".join(parts[0::4]), list(zip(parts[1::4], parts[2::4], strict=True))


def without_code(text):
    return split_fences(text)[0]


def blocks(text, language):
    return [content for each, content in split_fences(text)[1] if each == language]


# Links ----------------------------------------------------------------------------------------------------------------


def anchors(text):
    """Return the anchors of headings, as GitHub generates them."""
    found = []
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", without_code(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return set(found)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_are_valid(name):
    text = re.sub(r"`[^`]*`", "", without_code(text_of(name)))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{name}: {target}"


def test_links_and_headings_are_found():
    assert {"README.md", "jobs/README.md", "jobs/troubleshooting.md"} <= set(DOCUMENTS)
    assert anchors("# A b\n```\n# no\n```\n## It's `of`, [x](y)\n## A b\n") == {"a-b", "its-of-x", "a-b-1"}


# Commands -------------------------------------------------------------------------------------------------------------


NEEDED = (
    ("data", "train_files", "data.train_files=[a.parquet]"),
    ("model", "path", "model.path=m"),
    ("reward", "functions", "reward.functions=[a.py:f]"),
)
"""Required settings that partial jobs in documents omit: (group, key, setting)."""
COMPOSED = cache(lambda words, files: to_config(compose_job([*words]), lambda _: Facts()))


class Parsed(Exception):
    """Raised when a command's parser has parsed its arguments: (namespace, remaining words)."""


def composed(words):
    """Check the command, except for files on other machines; cached by words and files."""
    return COMPOSED(tuple(words), tuple(Path(word).read_text() for word in words if Path(word).is_file()))


@pytest.fixture
def stop_after_parsing(monkeypatch):
    """Make argument parsers raise `Parsed` after parsing, so that commands do nothing else."""
    known = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self, args=None, namespace=None):
        found, rest = known(self, args, namespace)
        if self.prog.startswith("rlfuse "):
            raise Parsed(found, rest)
        return found, rest

    def parse_args(self, args=None, namespace=None):
        try:
            found, rest = self.parse_known_args(args, namespace)
        except Parsed as end:
            if not end.args[1]:
                raise
            rest = end.args[1]
        return self.error(f"unrecognized arguments: {rest}") if rest else found

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


def typed(text):
    """Return the words of each command in the fences of a document; in transcripts, of lines after `$`."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for block in blocks(text, "") for line in block.splitlines() if line.startswith("$ ")]
    for line in lines:
        yield from split(shlex.split(line, comments=True))


def split(words):
    """Return the commands of a line, without variable assignments and redirections."""
    end = next((at for at, word in enumerate(words) if word in ("&&", "||", "|", ">", ";")), len(words))
    command = words[:end]
    while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
        command = command[1:]
    if command:
        yield command
    if words[end : end + 1] not in ([], [">"]):
        yield from split(words[end + 1 :])


def mentioned(text):
    """Return the words of each complete command in the sentences and tables of a document."""
    for piece in re.findall(r"(?<!`)`(rlfuse [^`]+)`(?!`)", without_code(text)):
        if not re.search(r"\.\.\.|[\[|]", piece):
            yield shlex.split(piece)


def parsed_by(name, words):
    """Return (namespace, remaining words) from the command's parser."""
    with pytest.raises(Parsed) as end:
        importlib.import_module(MODULES[name]).main(words)
    return end.value.args


def first_error(word):
    """Return a setting with the first of a sweep's values."""
    if "=" not in word or word.endswith(".yaml"):
        return word
    override = OverridesParser.create().parse_override(word)
    several = override.is_sweep_override()
    return f"{override.key_or_group}={next(override.sweep_string_iterator())}" if several else word


def check_train(words):
    """Check names, types and values of a job; of a sweep, of its first job."""
    if "--help" in words:
        return
    if "-m" in words:
        read_command(words)
        words = [first_error(word) for word in words if word != "-m" and not word.startswith("hydra")]
    elif words[:2] == ["--cfg", "job"]:
        words = words[2:]
    assert composed(words).model.path


def check_command(words):
    """Raise an error for an invalid command, and SystemExit for invalid options."""
    name, arguments = words[1], words[2:]
    assert name in COMMANDS, words
    if not arguments or name == "train":
        return check_train(arguments) if arguments else None
    if name == "translate":
        if arguments[0] == "--":
            assert translate(read(arguments)).settings
        return None
    if name == "runs" and arguments[0] == "clean":
        return parsed_by(name, arguments)
    found, rest = parsed_by(name, arguments)
    if name == "prepare":
        assert found.task in TASKS
    elif arguments[0] == "replay":
        assert read_command(found.settings)
    elif name in ("plan", "submit") and rest:
        assert composed([*rest, *(NEEDED[n][2] for n in (0, 2) if "--search" in arguments)]).model.path
    elif name in ("eval", "generate"):
        assert not any(word.startswith("-") for word in rest), rest
        _, settings = split_checkpoint(rest)
        if any(is_job_argument(word) for word in settings):
            assert composed(settings).model.path
    return None


def check_script(words):
    """Check a script of the repository that is called with settings, which must compose with its last experiment."""
    at = next(at for at, word in enumerate(words) if re.search(r"/.*\.(sh|slurm|py|yaml)$", word))
    script = ROOT / words[at]
    assert script.exists(), words
    source, given = script.read_text(), words[at + 1 :]
    settings = [word for word in given if re.match(r"[a-z_]+[.\w]*=", word) or word.endswith(".yaml")]
    if script.suffix == ".py":
        assert all(f'"{word.partition("=")[0]}"' in source for word in given if word.startswith("--")), words
    elif settings:
        assert composed([*re.findall(r"experiment=\w+", source)[-1:], *settings]).data.train_files, words


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """Create a working folder with `jobs` and the files that a document shows by name."""

    def write(text):
        for language in ("yaml", "python"):
            for block in blocks(text, language):
                if name := re.match(r"# ([\w/]+\.(?:yaml|py))\b", block):
                    (tmp_path / name[1]).parent.mkdir(parents=True, exist_ok=True)
                    (tmp_path / name[1]).write_text(block)

    write(text_of("README.md"))
    write(text_of("jobs/README.md"))
    (tmp_path / "DIR" / "lengths").mkdir(parents=True)
    (tmp_path / "DIR" / "lengths" / "long.yaml").write_text("data: {max_response_length: 4096}\n")
    (tmp_path / "jobs").symlink_to(JOBS)
    monkeypatch.chdir(tmp_path)
    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_in_documents_are_valid_and_their_jobs_compose(name, working_folder, stop_after_parsing):
    text = text_of(name)
    working_folder(text)
    for words in [*typed(text), *mentioned(text)]:
        if words[0] == "rlfuse" and len(words) > 1 and not words[1].startswith("-"):
            check_command(words)
        elif words[0] in ("bash", "sbatch") or re.match(r"kubectl apply|python \S+\.py", " ".join(words)):
            check_script(words)
        elif words[:2] == ["docker", "build"]:
            assert (ROOT / words[words.index("-f") + 1]).exists()


@pytest.mark.slow
def test_commands_in_job_files_and_help_compose(working_folder, stop_after_parsing):
    found = [line for path in JOBS.glob("*.yaml") for line in re.findall(r"^# {3}(rlfuse .*?)(?: {3}.*)?$",
             path.read_text(), re.MULTILINE)]  # fmt: skip
    found += [task.then for task in TASKS.values()]
    assert len(found) > 8
    for line in found:
        check_command(shlex.split(line))


def test_invalid_commands_are_detected(working_folder, stop_after_parsing):
    text = "```bash\nrlfuse runs && rlfuse train a.yaml \\\n  n=8   # a comment\nA=1 bash jobs/x.sh > b\n```\n"
    assert [*typed(text)] == [["rlfuse", "runs"], ["rlfuse", "train", "a.yaml", "n=8"], ["bash", "jobs/x.sh"]]
    refused = ("train my_job.yaml rolout.n=8", "evaluate my_job.yaml", "prepare gsm9k", "eval my_job.yaml --k 3")
    for wrong in (f"rlfuse {each}" for each in refused):
        with pytest.raises((ValueError, AssertionError)):
            check_command(shlex.split(wrong))
    for wrong in ("rlfuse trace a b", "rlfuse report a --output b"):
        with pytest.raises(SystemExit):
            check_command(shlex.split(wrong))
    with pytest.raises(AssertionError):
        check_script(["bash", "jobs/nothing.sh"])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_jobs_in_documents_compose(name, tmp_path):
    for number, block in enumerate(blocks(text_of(name), "yaml")):
        file, shown = tmp_path / f"job{number}.yaml", yaml.safe_load(block)
        file.write_text(block)
        missing = [word for group, key, word in NEEDED if key not in shown.get(group, {})]
        assert composed([str(file), *missing]), block


# Keys and names -------------------------------------------------------------------------------------------------------


def known(name):
    """Return whether this is a key, a group of keys, below a free key, or a preset group."""
    return name in by_name() or name in groups() or is_free(name) or name in PRESET_GROUPS


@pytest.mark.parametrize("name", OURS)
def test_keys_in_documents_exist(name):
    tops = {group.partition(".")[0] for group in groups()}
    for piece in re.findall(r"(?<!`)`([^`]+)`(?!`)", without_code(text_of(name))):
        for word in piece.split():
            key = re.match(r"([a-z_]+(?:\.\w+)+)(=|$)", word.strip("',"))
            if key and key[1].partition(".")[0] in tops and key[1] not in NAMES_OF_VERL and not key[1].endswith(".X"):
                assert known(key[1]), f"{name}: {word}"


VERLS = json.loads((Path(__file__).parent / "verl_keys.json").read_text())
NAMES_OF_VERL = {*VERLS, *VERL}
"""Names of verl's keys; some of its groups have the same names as those of rlfuse."""


def rows(text, head):
    """Return the cells of tables that begin with this header."""
    for table in re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for line in table.splitlines():
            yield [re.findall(r"`([^`]+)`", cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def fields_of(*files):
    """Return the fields of dataclasses in installed files, without importing them."""
    found = set()
    for file in files:
        for node in ast.parse((Path(sysconfig.get_path("purelib")) / file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                found |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    return found


def test_names_of_verl_exist_and_are_translated_as_documented():
    found = [row for row in rows(text_of("jobs/coming_from.md"), "verl \\| here") if ".X" not in str(row)]
    assert len(found) > 20
    for theirs, ours, *_ in found:
        assert all(map(known, ours)), ours
        for name in theirs:
            assert name in NAMES_OF_VERL, name
            translation = counterpart(name, frozenset(by_name()))
            same = name in by_name() or any(key.startswith(tuple(ours)) for key in translation.keys)
            assert same or name in CONVERSIONS, name
    for theirs, ours in (row[:2] for row in rows(text_of("jobs/coming_from.md"), "verl \\| here") if ".X" in str(row)):
        for verl_name, our_name in zip(theirs, ours, strict=False):
            assert dict(VERL_PREFIXES)[verl_name.removesuffix("X")] == our_name.removesuffix("X")


def test_names_of_trl_exist_in_the_installed_version():
    theirs = fields_of("trl/trainer/grpo_config.py", "trl/trainer/rloo_config.py", "trl/trainer/base_config.py",
                       "transformers/training_args.py")  # fmt: skip
    found = list(rows(text_of("jobs/coming_from.md"), "TRL \\| here"))
    assert len(found) > 20
    for names, ours, *_ in found:
        assert {name for name in names if not name.endswith("Config")} <= theirs, names
        assert ours and all(map(known, ours)), ours


def templates():
    """Return the string literals of the source as they are printed, with `...` for replacement fields."""
    for path in (ROOT / "rlfuse").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    install = (JOBS / "install.sh").read_text().replace('" \\\n            "', " ").replace('" \\\n        "', " ")
    yield re.sub(r"\$\{?\w+(?:\^\^)?\}?", "...", install)


@pytest.mark.slow
def test_documented_messages_are_printed_by_the_source():
    printed = list(templates())
    text = without_code(text_of("jobs/troubleshooting.md"))
    messages = [piece for row in rows(text, "(?:printed|title)") for piece in row[0]]
    messages.remove("rlfuse: command not found")  # printed by the shell
    assert len(messages) > 60
    for message in messages:
        pieces = [piece for piece in re.split(r"\.\.\.", message) if piece.strip()]
        assert any(all(piece in each for piece in pieces) for each in printed), message
