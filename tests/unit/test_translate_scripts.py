"""Scripts that `rlfuse translate` reads without running them: shell, and Python that calls a trainer of TRL."""

import pytest

from rlfuse.errors import ConfigError
from rlfuse.tools.translate.command import read, translate
from rlfuse.tools.translate.shell import Script

SHELL = r"""
A="x y"; B=${B:-"${C:-$HOME/q}"}   # comment
LIST=(one "two $A")
LIST+=('three#3')
N=$((2 * (3 + 4) - 1))
UNKNOWN=$(date +%s)
for i in 1 2; do INSIDE=$i; done
LAST=0; for LAST in 1 2; do :; done; SET=1; set_it() { SET=2; }
NAME=a; NAME+=_b; OPTIONS="x=1 y=$UNSET"; OPTIONS+=" z=3"
run2 $LAST $SET $NAME $OPTIONS
run $A "$A" '$A' $'a\tb' $B ${LIST[@]} "${LIST[@]}" $N $PWD/f "$(pwd)" "$UNKNOWN" $INSIDE $EMPTY "$@" \
   # in between \
   last=a\ b`date`; other
"""


def test_a_script_is_parsed_like_a_shell_does_without_running_it():
    (words,) = [words for words in Script().commands(SHELL) if words[0].text == "run"]
    assert [word.text for word in words[1:]] == [
        *("x", "y", "x y", "$A", r"$'a\tb'", "${oc.env:HOME}/q", "one", "two", "x", "y", "three#3"),
        *("one", "two x y", "three#3"),
        *("13", "f", ".", "$(date +%s)", "$INSIDE", "$EMPTY", "last=a b`date`"),
    ]
    assert [word.unknown for word in words[-4:]] == [("$(date +%s)",), ("$INSIDE",), ("$EMPTY",), ("`date`",)]
    (words,) = [words for words in Script().commands(SHELL) if words[0].text == "run2"]
    assert [word.text for word in words[1:]] == ["$LAST", "$SET", "a_b", "x=1", "y=$UNSET", "z=3"]
    assert [bool(word.unknown) for word in words[1:]] == [True, True, False, False, True, False]
    for text in ("$((1/0))", "$((9**9**9))", "${A%b}", "'open", '"open', "${open", "$(open", "a=(1", "`a", "\\", "$"):
        assert next(Script().commands(f"run {text}"))[0].text == "run"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("export A=2 B=3", "2"),
        ("A=2 other", "1"),
        ("eval $(conda shell.bash hook); source /opt/conda/bin/activate", "1"),
        *((change, None) for change in (
            "source common.sh", ". ./common.sh", "eval $(parse $@)", "((A++))", "(( A = 2 ))", "let A=2",
            "for ((A=0; A<2; A++)); do", "printf -v A 2", "mapfile -t A < x", "while IFS= read -r A; do",
            "while true; do read A", "if a; then if b; then :; fi; fi; if c; then A=2; fi",
        )),
    ],
)  # fmt: skip
def test_a_variable_that_may_have_changed_is_unknown(change, value):
    words = next(words for words in Script().commands(f"A=1\n{change}\nrun $A") if words[0].text == "run")
    assert (words[1].text == value and not words[1].unknown) if value else words[1].unknown


ODD = r"""cat > notes.txt <<'END'
python3 -m verl.trainer.main_ppo data.train_files=never.parquet
it's no command
END
[ -n "$LONG" ] && LENGTH=4096
ARGS=(
    data.train_batch_size=64
    # the reader's own
    actor_rollout_ref.actor.optim.total_training_steps=500
)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" \
    data.max_response_length=$LENGTH data.max_prompt_length=512 trainer.total_epochs=$EPOCHS \
    trainer.experiment_name="one \
two" trainer.project_name=`date +%F` > out.log 2>&1
"""


def test_unusual_scripts_are_parsed_like_a_shell_does(tmp_path):
    (tmp_path / "run.sh").write_text(ODD)
    job = translate(read([str(tmp_path / "run.sh")]))
    assert job.settings["data.train_batch_size"] == 64 and "data.train_files" not in job.settings
    assert job.settings["trainer.experiment_name"] == "one two", "a continued line in quotes is one"
    assert "trainer.total_training_steps" not in job.settings, "verl sets the number of steps of the run there"
    assert {"data.max_response_length", "trainer.total_epochs"} <= job.undecided.keys()
    assert "trainer.project_name=`date +%F`" in str(job.notes)
    assert "trainer.total_epochs" not in job.settings, "an unknown value is not replaced by the default"


GRPO = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
from my_rewards import exact

MODEL = "Qwen/Qwen2-0.5B-Instruct"
dataset = load_dataset("trl-lib/tldr", split="validation")
config = GRPOConfig(output_dir="out", learning_rate=2e-6, num_generations=4, max_steps=200)
GRPOTrainer(model=MODEL, reward_funcs=[exact, think_format_reward], args=config, train_dataset=dataset).train()
trainer.args.beta = 1
raise SystemExit("a script is not executed")
"""
DPO = """
import trl
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
trl.DPOTrainer(model, args=trl.DPOConfig(beta=0.2, per_device_train_batch_size=4), train_dataset=rows).train()
"""


def job_of(text, folder):
    (folder / "train.py").write_text(text)
    return translate(read([str(folder / "train.py")]))


def test_literal_arguments_become_settings(tmp_path):
    job = job_of(GRPO, tmp_path)
    expected = {
        "model.path": "Qwen/Qwen2-0.5B-Instruct",
        "rollout.n": 4,
        "actor.optim.lr": 2e-6,
        "trainer.total_training_steps": 200,
        "reward.functions": ["my_rewards:exact", "trl.rewards:think_format_reward"],
    }
    assert {key: job.settings[key] for key in expected} == expected
    assert (
        "trl-lib/tldr" in job.undecided["data.train_files"][0] and "validation" in job.undecided["data.train_files"][0]
    )
    assert {*job.undecided} == {"data.train_files", "trainer.n_gpus_per_node"}


ALIASES = """
import os, trl as t
from datasets import load_dataset as load
from transformers import AutoTokenizer
from trl import GRPOConfig as Config
import my_rewards
os.environ["WANDB_MODE"] = "disabled"
NAME: str = "m"
options = {"num_generations": 4}
rewards = [my_rewards.exact, "r"]
tokenizer = AutoTokenizer.from_pretrained(NAME, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
config = Config("out", report_to="wandb", reward_weights=[1.0, 0.5], **options)
print(config)
def main():
    trainer = t.GRPOTrainer(
        model=NAME, reward_funcs=rewards, args=config, train_dataset=load("./d"), processing_class=tokenizer,
        peft_config=None, callbacks=[], optimizers=None,
    )
    trainer.train()
    trainer.save_model(config.output_dir)
"""


def test_names_are_resolved_to_their_definitions(tmp_path):
    job = job_of(ALIASES, tmp_path)
    expected = {
        "model.path": "m",
        "rollout.n": 4,
        "trainer.default_local_dir": "out",
        "data.train_files": ["./d"],
        "reward.functions": ["my_rewards:exact", "reward_model"],
        "reward.weights": [1.0, 0.5],
        "reward.model_path": "r",
        "trainer.wandb_mode": "disabled",
    }
    assert {key: job.settings[key] for key in expected} == expected
    assert {*job.undecided} == {"trainer.n_gpus_per_node"}


@pytest.mark.parametrize(
    ("old", "new", "key", "why"),
    [
        ("model=MODEL", "model=load(MODEL)", "model.path", "load(MODEL): the script computes the value"),
        ("num_generations=4", "num_generations=n", "rollout.n", "num_generations=n: the script computes"),
        ("max_steps=200", "**options", "trainer.task", "**=options: the script computes"),
        ("dataset = load_dataset", "dataset = dataset.map(f) or load_dataset", "data.train_files", "dataset"),
        ("dataset = load_dataset", "dataset = my.load_dataset", "data.train_files", "dataset_name=dataset: the"),
        ("[exact, ", "[local, ", "reward.functions", "reward_funcs=local: is defined in the script"),
        ("[exact, ", "[lambda x: 1, ", "reward.functions", "reward_funcs=lambda x: 1: is defined in the script"),
        ("[exact, ", "[make(1), ", "reward.functions", "reward_funcs=make(1): the script computes the value"),
        ("[exact, ", "['a', 'b', ", "reward.functions", "reward_funcs='b': is a second reward model"),
        ("MODEL =", "def exact(): ...\nMODEL =", "reward.functions", "reward_funcs=exact: is defined in the script"),
        ("from my_rewards", "from .rewards", "reward.functions", "reward_funcs=exact: is defined in the script"),
        ("args=config", "args=config, peft_config=lora", "model.path", "LoRA"),
        ("args=config", "args=config, callbacks=[stop]", "trainer.task", "callbacks=[stop]: the script computes"),
        ("args=config", "args=config, processing_class=tokenizer", "model.path", "uses the tokenizer of the model"),
        ("model=MODEL, reward_funcs=[", "MODEL, [exact], reward_funcs=[", "trainer.task", "[exact]: is not passed by"),
        ("config = ", "config = None\nconfig = ", "trainer.task", "args=config: the script computes the config"),
        ("config = ", "config.beta = 1\nconfig = ", "trainer.task", "args=config: the script computes the config"),
        ("config = ", "setattr(config, 'a', 1)\nconfig = ", "trainer.task", "args=config: the script computes"),
        ("config = ", "tweak(args=config)\nconfig = ", "trainer.task", "args=config: the script computes the config"),
        ("config = GRPOConfig(", "config = replace(GRPOConfig(), ", "trainer.task", "args=config: the script computes"),
        ("config = ", "class Mine(GRPOConfig): ...\nconfig = Mine() or ", "trainer.task", "args=config: the script"),
        ("GRPOConfig(output", "GRPOConfig(*given, output", "trainer.task", "argument=*given: the script computes"),
        ("GRPOTrainer(model", "GRPOTrainer(*given, model", "trainer.task", "argument=*given: is not passed by name"),
        ("2e-6", "lr", "actor.optim.lr", "learning_rate=lr: the script computes the value"),
        ("2e-6", "float(os.environ['LR'])", "actor.optim.lr", "the script computes the value"),
        ("MODEL = ", "MODEL += 'a'\nMODEL = ", "model.path", "model_name_or_path=MODEL: the script computes the value"),
        ("MODEL = ", "def f(MODEL): ...\nMODEL = ", "model.path", "model_name_or_path=MODEL: the script computes"),
        ("model=MODEL,", "model=MODEL, rollout_func=f,", "trainer.task", "rollout_func=f: the script computes"),
        (".train()", ".train(resume_from_checkpoint=True)", "trainer.resume_mode", "cannot be resumed"),
        ("GRPOTrainer(", "trainer = GRPOTrainer(", "trainer.task", "beta of trainer: changes the trainer after it is"),
        ("MODEL = ", "GRPOTrainer._loss = f\nMODEL = ", "trainer.task", "_loss of GRPOTrainer: changes TRL"),
        ("MODEL = ", "import unsloth\nMODEL = ", "trainer.task", "import unsloth: replaces the trainers of TRL"),
        ("GRPOTrainer(", "for _ in '12': GRPOTrainer(", "trainer.task", "loop: creates several trainers"),
    ],
)
def test_values_that_a_script_computes_are_left_open(old, new, key, why, tmp_path):
    assert why in "; ".join(job_of(GRPO.replace(old, new), tmp_path).undecided[key])


def test_preference_scripts_become_a_dpo_task(tmp_path):
    job = job_of(DPO, tmp_path)
    assert (job.settings["trainer.task"], job.settings["dpo.beta"], job.settings["data.train_batch_size"]) == (
        "dpo",
        0.2,
        4,
    )
    assert "model: the script computes the value" in job.undecided["model.path"][0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("from trl import (", "not valid Python"),
        ("a = " + "-" * 100_000 + "1", "not valid Python"),
        ("print('hello')", "0 calls of a trainer of TRL"),
        (GRPO + "GRPOTrainer(model=MODEL)", "2 calls of a trainer of TRL"),
        (GRPO + "class Mine(GRPOTrainer): ...\nMine(model=MODEL)", "2 calls of a trainer of TRL"),
        ("import trl\nclass Mine(trl.GRPOTrainer): ...\nMine(model='m')", "0 calls of a trainer of TRL"),
    ],
)
def test_other_scripts_are_rejected(text, part, tmp_path):
    with pytest.raises(ConfigError, match=part):
        job_of(text, tmp_path)
