"""`rlfuse plan`: memory in each phase, verdicts, remedies, forecasts, exit statuses."""

import json
from dataclasses import replace

import pytest
import transformers
from test_plan_models import FAMILIES, NARROW, job

from rlfuse import cli
from rlfuse.engines.memory.activations import activations, micro_batch_tokens, stage_parts, worst_micro_batches
from rlfuse.engines.memory.estimate import GIB, Budget, memory_of, parameters_on
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.memory.remedies import problems, remedies
from rlfuse.engines.memory.residency import GENERATING, LOADING, PHASES, SAVING, SYNC, TRAINING, Item
from rlfuse.engines.memory.tracing import SequenceLengths
from rlfuse.tools.planning.costs import costs_of
from rlfuse.tools.planning.forecast import forecast, lengths_of
from rlfuse.tools.planning.hardware import Hardware
from rlfuse.tools.planning.step_time import StepTimes
from rlfuse.tools.planning.tables import placements

SEVEN_B = dict(
    model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture
def small(tmp_path):
    FAMILIES["qwen2"].save_pretrained(tmp_path / "small")
    return str(tmp_path / "small")


@pytest.fixture
def large(tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(SEVEN_B))
    return str(tmp_path / "large")


@pytest.mark.slow
def test_worst_micro_batch_has_short_prompts_and_long_responses(large):
    shape = read_shape(large, "model.path")
    config = job(data__max_prompt_length=30_000, data__max_response_length=2048, actor__ppo_mini_batch_size=64)
    config.model.enable_gradient_checkpointing = True
    answers, *_ = worst_micro_batches(config, linear=True)
    assert sum(sum(each) for each in answers.lengths) == 16384 and {prompt for prompt, _ in answers.lengths} == {1}
    predicted = sum(response for _, response in answers.lengths)
    logits = 2 * predicted * shape.vocabulary * 2  # in bfloat16, with their gradient
    assert activations(config, shape, "actor", "cuda") > logits > 9 * GIB


@pytest.mark.slow
def test_plan_refuses_what_train_refuses(tmp_path, capsys):
    transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64).save_pretrained(tmp_path)
    assert command(tmp_path, "--device-memory", "80") == 2
    err = capsys.readouterr().err
    assert "mamba have recurrent state and no attention; training needs a model with attention layers" in err
    text = NARROW | {"head_dim": 16, "max_position_embeddings": 4096}
    transformers.Gemma3Config(text_config=text, vision_config=dict(num_hidden_layers=1)).save_pretrained(tmp_path)
    assert command(tmp_path, "--device-memory", "80") == 2
    assert "a gemma3 model can't be used" in capsys.readouterr().err


def sizes(memory, role):
    return {part.what: part.size for part in memory.parts if part.role == role}


@pytest.mark.slow
def test_model_states_of_each_zero_stage(small):
    shape = read_shape(small, "model.path")
    shapes, budget, n = {"actor": shape}, Budget("cuda", 80 * GIB), shape.parameters
    for stage, (weights, gradients, optimizer) in {
        0: (2, 4, 12), 1: (2, 4, 12 / 8), 2: (2, 4 / 8, 12 / 8), 3: (2 / 8, 4 / 8, 12 / 8)
    }.items():  # fmt: skip
        parts = sizes(memory_of(job(actor__zero_stage=stage), shapes, budget), "actor")
        assert parts["parameters"] == pytest.approx(weights * n)
        assert parts["gradients"] == pytest.approx(gradients * n)
        assert parts["optimizer"] == pytest.approx(optimizer * n)
    offloaded = memory_of(job(actor__offload_optimizer=True), shapes, budget)
    assert "optimizer" not in sizes(offloaded, "actor") and offloaded.host == pytest.approx(12 * n / 8)
    short = {"actor__ppo_max_token_len_per_gpu": 1024}  # float32 has no varlen kernel, so each segment is traced
    wide = memory_of(job(model__dtype="float32", actor__zero_stage=0, **short), shapes, budget)
    assert sizes(wide, "actor")["optimizer"] == 8 * n, "fp32 without ZeRO has no second copy of the weights"
    narrow = memory_of(job(actor__grad_accum_dtype="bfloat16"), shapes, budget)
    assert sizes(narrow, "actor")["gradients"] == 2 * n


@pytest.mark.slow
def test_phases_alternate_on_gpus_and_add_up_on_cpus(small):
    shape = read_shape(small, "model.path")
    shapes = {"actor": shape, "critic": shape, "reference": shape}
    gpu = memory_of(job(rollout__free_cache_engine=True), shapes, Budget("cuda", 80 * GIB))
    assert gpu.phases == PHASES == (LOADING, GENERATING, TRAINING, SYNC, SAVING)

    def resident(phase):
        return {(part.role, part.what) for part in gpu.of(phase)}

    trained = {(role, what) for role in ("actor", "critic") for what in ("parameters", "optimizer")}
    trained.add(("reference", "parameters"))
    engine, always = ("engine", "parameters"), ("processes", "base memory")
    for phase in (LOADING, TRAINING, SYNC, SAVING):
        assert resident(phase) >= trained | {always}
    served = {("engine", what) for what in ("parameters", "KV cache", "work space", "graphs and buffers")}
    assert resident(GENERATING) == {always, ("processes", "NCCL's buffers"), *served}
    assert engine in resident(SYNC) and ("engine", "KV cache") not in resident(SYNC)
    assert engine not in resident(TRAINING)
    assert ("actor", "gradients") in resident(TRAINING) and ("actor", "gradients") not in resident(SYNC)
    assert gpu.total(gpu.tightest) == max(gpu.total(phase) for phase in PHASES)
    cpu = memory_of(job(actor__ppo_max_token_len_per_gpu=1024), shapes, Budget("cpu", 4 * GIB))
    assert cpu.phases == (TRAINING,) and cpu.total(TRAINING) == sum(part.size for part in cpu.parts)


@pytest.mark.slow
def test_weight_updates_need_memory_in_ranks_and_engines(small, large):
    small, large = (read_shape(path, "model.path") for path in (small, large))
    for stage, times in ((1, 3), (3, 4)):
        memory = memory_of(job(actor__zero_stage=stage), {"actor": small}, Budget("cuda", 80 * GIB))
        assert sizes(memory, "actor")["bucket of weights"] == times * (512 << 20)
    memory = memory_of(job(rollout__update_weights_bucket_mb=1), {"actor": large}, Budget("cuda", 80 * GIB))
    assert sizes(memory, "actor")["bucket of weights"] == 3 * 2 * max(large.layers), "layers are not split"
    assert sizes(memory, "engine")["layer being loaded"] == 2 * large.embedding


@pytest.mark.slow
def test_reward_models_stay_on_their_slots(small):
    shape, budget = read_shape(small, "model.path"), Budget("cuda", 80 * GIB)
    config = job(2, reward__model_dtype="float32")
    memory = memory_of(config, {"actor": shape}, budget, {str(i): shape for i in range(3)})
    models = sizes(memory, "reward models")
    assert models["parameters"] == 2 * 4 * shape.parameters, "one slot holds two of the three models"
    assert models["work space"] > 2 * GIB
    assert {part.item for part in memory.parts if part.role == "reward models"} == {Item.RESIDENTS}


@pytest.mark.slow
def test_engine_memory_follows_its_arguments(large):
    shape, budget = read_shape(large, "model.path"), Budget("cuda", 80 * GIB)

    def engine(shape, **changes):
        many = {"rollout__max_num_seqs": 2048}  # enough to use all of the cache
        return memory_of(job(**(many | changes)), {"actor": shape}, budget)

    whole = engine(shape)
    more = engine(shape, rollout__engine_kwargs={"gpu_memory_utilization": 0.7, "max_num_batched_tokens": 32768})
    assert more.total(GENERATING) - whole.total(GENERATING) == pytest.approx(0.2 * 80 * GIB)
    assert sizes(more, "engine")["work space"] > 3 * sizes(whole, "engine")["work space"] / 2
    long = {"data__max_prompt_length": 80_000}
    clips = engine(replace(shape, tower=1000), **long)
    assert sizes(clips, "engine")["work space"] > 5 * sizes(engine(shape, **long), "engine")["work space"] / 2
    few = {"rollout__max_num_seqs": 64}
    drafts = sizes(engine(shape, **few, rollout__draft="history"), "engine")["work space"]
    logits = 64 * 16 * shape.vocabulary * 2
    assert drafts - sizes(engine(shape, **few), "engine")["work space"] == pytest.approx(logits)


@pytest.mark.slow
def test_kv_cache_size(small):
    shape = read_shape(small, "model.path")
    assert shape.cache.bytes_of(1, 2) == 2 * 3 * 2 * 8 * 2
    assert shape.cache.bytes_of(1, 2, width=2) == shape.cache.bytes_of(1, 2, width=4) == 2 * 3 * 1 * 8 * 2
    config = job(rollout__kv_cache_memory_mb=1, actor__ppo_max_token_len_per_gpu=1024)
    memory = memory_of(config, {"actor": shape}, Budget("cpu", 4 * GIB))
    assert memory.kv_tokens == (1 << 20) // shape.cache.bytes_of(1, 2)
    assert "generating: the KV cache" not in "".join(problems(config, memory))
    config.data.max_response_length = 6000
    (line,) = problems(config, memory)
    assert "room for 5461 tokens" in line and "rollout.kv_cache_memory_mb=1" in line
    assert remedies(config, {"actor": shape}, memory.budget) == "It fits with rollout.kv_cache_memory_mb=2."


def test_micro_batches_hold_the_budget_or_one_long_sequence():
    assert micro_batch_tokens(job()) == 16384
    assert micro_batch_tokens(job(actor__ppo_micro_batch_size_per_gpu=2)) == 2048
    assert micro_batch_tokens(job(data__max_response_length=99_488)) == 100_000
    assert (
        micro_batch_tokens(job(data__max_response_length=99_488, training__ulysses_sequence_parallel_size=4)) == 25000
    )
    few = {"data__train_batch_size": 4, "actor__ppo_mini_batch_size": 2}

    def tokens(**changes):
        config = job(**few, **changes)
        return micro_batch_tokens(config), micro_batch_tokens(config, learns=True)

    assert tokens() == (16 * 1024, 8 * 1024), "one free slot may receive all"
    assert tokens(actor__zero_stage=2) == (16 * 1024, 4 * 1024), "ranks in lockstep hold the responses to one prompt"
    assert tokens(actor__zero_stage=3) == (4 * 1024, 4 * 1024)
    assert tokens(training__pipeline_parallel_size=2) == (4 * 1024, 2 * 1024), "each pipeline has its share"
    assert tokens(rollout__tensor_model_parallel_size=4) == (4 * 1024, 4 * 1024), "the ranks of a slot share"
    (texts, _) = worst_micro_batches(job(**few), linear=True)
    assert texts.lengths == ((512, 512),) * 8, "so few samples only reach the token count with long prompts"


@pytest.mark.parametrize(
    ("task", "changes", "tokens"),
    [
        ("sft", {}, 8 * 1024),
        ("dpo", {}, 16 * 1024),
        ("reward_model", {}, 16 * 1024),
        ("sft", {"actor__ppo_micro_batch_size_per_gpu": 1}, 1024),
        ("dpo", {"actor__ppo_micro_batch_size_per_gpu": 1}, 2 * 1024),
        ("dpo", {"data__max_response_length": 15_872}, 2 * 16 * 1024),
    ],
)
def test_a_step_of_an_offline_task_is_a_batch_of_rows_or_pairs(task, changes, tokens):
    config = job(trainer__task=task, data__train_batch_size=64, actor__ppo_mini_batch_size=1, actor__zero_stage=3)
    for name, value in changes.items():
        section, leaf = name.split("__")
        setattr(getattr(config, section), leaf, value)
    assert micro_batch_tokens(config, learns=True) == tokens
    assert max(sum(map(sum, each.lengths)) for each in worst_micro_batches(config, linear=True)) == tokens


@pytest.mark.slow
def test_passes_without_gradients_run_over_the_whole_batch(small):
    shapes = {role: read_shape(small, "model.path", value=role == "critic") for role in ("actor", "critic")}
    config = job(data__train_batch_size=32, actor__ppo_mini_batch_size=1, rollout__n=1)
    text = SequenceLengths(((1, 511), *[(1, 512)] * 31))  # the whole budget of 16384
    for role, does in (("actor", "reference"), ("critic", "values")):
        whole = shapes[role].model.work(config, does, text, "cuda").peak
        mini = max(
            shapes[role].model.work(config, role, each, "cuda").peak
            for each in worst_micro_batches(config, linear=True)
        )
        assert activations(config, shapes[role], role, "cuda") == pytest.approx(whole, rel=0.02) and whole > 2 * mini
    reference = activations(config, shapes["actor"], "reference", "cuda")
    assert reference == activations(config, shapes["actor"], "actor", "cuda")


@pytest.mark.slow
def test_misfits_are_reported_and_remedies_help(large):
    shapes, budget = {"actor": read_shape(large, "model.path")}, Budget("cuda", 80 * GIB)
    config = job()
    (line,) = problems(config, memory_of(config, shapes, budget))
    assert line.startswith("training: needs") and "actor's activations" in line
    before = memory_of(config, shapes, budget).total(TRAINING)
    for changes in (
        {"model__enable_gradient_checkpointing": True}, {"actor__ppo_max_token_len_per_gpu": 8192},
        {"actor__zero_stage": 3}, {"actor__offload_optimizer": True}, {"actor__optimizer_residency": "step"},
        {"slots": 16},
    ):  # fmt: skip
        assert memory_of(job(**changes), shapes, budget).total(TRAINING) < before
    config = job(model__enable_gradient_checkpointing=True, actor__zero_stage=3)
    assert problems(config, memory_of(config, shapes, budget)) == []
    helps = remedies(job(), shapes, budget)
    assert "model.enable_gradient_checkpointing=true" in helps
    for words in helps.removeprefix("It fits with ").removesuffix(".").split("; or with "):
        key, value = words.split(" ")[0].split("=")
        changed = job(**{key.replace(".", "__"): {"true": True}.get(value) or int(value)})
        assert problems(changed, memory_of(changed, shapes, budget)) == []
    tight = remedies(
        job(model__enable_gradient_checkpointing=True, actor__zero_stage=3), shapes, Budget("cuda", 14 * GIB)
    )
    assert "tensor_model_parallel_size=" in tight and "; or" not in tight, "more slots do not make an engine smaller"
    config = job(rollout__gpu_memory_utilization=0.1)
    assert "no room next to the engine's weights" in problems(config, memory_of(config, shapes, budget))[0]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_hold_the_whole_model_in_total(small, stages):
    shape, config = read_shape(small, "model.path"), job(training__pipeline_parallel_size=stages)
    for role in ("actor", "critic"):
        assert sum(parameters_on(config, shape, role, at) for at in range(stages)) == shape.parameters
    first = stage_parts(config, shape)[0]
    assert parameters_on(config, shape, "critic", stages - 1) == sum(shape.layers[i] for i in first.layers) + (
        shape.embedding
    )


def test_every_slot_has_its_roles(small):
    shape = read_shape(small, "model.path")
    config = job(4, training__pipeline_parallel_size=2, trainer__nnodes=2, rollout__tensor_model_parallel_size=2)
    found = placements(config, {"actor": shape, "critic": shape})
    assert [place.node for place in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found[3].engine == "rollout/1 (2 of 2)"
    first, second = (part.layers for part in stage_parts(config, shape))
    forwards = f"actor layers {first[0]}-{first[-1]}, critic layers {second[0]}-{second[-1]}"
    assert found[0].trainer == f"trainer/0: {forwards}" and forwards in found[6].trainer


def test_activations_of_a_pipeline_grow_with_its_memory_limit(small):
    shape = read_shape(small, "model.path")
    config = job(training__pipeline_parallel_size=2, training__activation_memory=1.0)
    more = job(training__pipeline_parallel_size=2, training__activation_memory=2.0)
    assert activations(config, shape, "actor", "cuda") < activations(more, shape, "actor", "cuda")


@pytest.mark.slow
def test_faster_devices_shorten_the_forecast(large):
    config, shapes = job(data__train_batch_size=6), {"actor": read_shape(large, "model.path")}
    config.algorithm.adv_estimator, config.fusion.policy = "grpo", "stream"
    lengths = lengths_of(config, 200.0)
    assert len(lengths) == 24 and max(lengths) <= 512 and sum(lengths) / 24 == pytest.approx(200, rel=0.01)
    times = StepTimes(shapes, lengths, 100)
    slow, fast = (
        forecast(config, times, costs_of(config, shapes, Hardware(*3 * [f * 1e12], b * 1e9), 300))
        for f, b in ((100, 1000), (400, 4000))
    )
    assert slow.seconds.step == pytest.approx(4 * fast.seconds.step, rel=0.05), "costs of calls are not counted"
    assert list(slow.steps) == ["stream", "serial", "rlhfuse", "adaptive"]
    tokens = sum(lengths) + 24 * 100
    ideal = 8 * sum(shapes["actor"].layers) * tokens / 8 / 100e12  # passes and training, if all work were balanced
    assert slow.steps["serial"].step > ideal


@pytest.mark.parametrize("mean", [1, 300, 800, 1000, 1024])
def test_capped_lengths_keep_their_mean(mean):
    config = job()
    config.data.max_response_length = 1024
    lengths = lengths_of(config, mean)
    assert max(lengths) <= 1024 and sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.002, abs=0.3)


def command(model, *words):
    fixed = ["data.train_files=[a.parquet]", "reward.functions=[rlfuse.rewards.verifiers.exact:score]"]
    fixed += ["cluster.device=cuda", "algorithm=grpo", "data.train_batch_size=8"]
    fixed += ["actor.ppo_mini_batch_size=8", "rollout.n=2"]
    return cli.main(["plan", f"model.path={model}", "trainer.n_gpus_per_node=8", *fixed, *words])


@pytest.mark.slow
def test_statuses_for_ci(large, capsys):
    checkpointed = ["model.enable_gradient_checkpointing=true", "actor.zero_stage=3"]
    assert command(large, "--device-memory", "80", *checkpointed) == 0
    out = capsys.readouterr().out
    assert (
        "fits" in out and "7,615.6 M" in out and "trainer/7: actor, reference" in out and "Give --peak-tflops N" in out
    )
    tight = [checkpointed[0], "actor.ppo_max_token_len_per_gpu=1024", "fusion.policy=serial"]
    assert command(large, "--device-memory", "24", "--peak-tflops", "300", *tight) == 3
    out = capsys.readouterr().out
    assert (
        "does not fit  training: needs" in out
        and "generation" in out
        and "assumed: a device achieves 120 TFLOP/s" in out
    )
    assert "rollout.disaggregate=auto: no disaggregation: " in out and "error of the costs (30%)" in out
    assert command(large, "--device-memory", "80", "rollout.n=1") == 2
    assert "rollout.n=1: must be 2 or more" in capsys.readouterr().err
    assert command(large, "--device-memory", "-1", "--picture", "a.gif") == 2
    err = capsys.readouterr().err
    for part in ("--device-memory -1", "--picture a.gif", "pipeline_parallel_size above 1", "needs costs"):
        assert part in err
    assert command(large, "--device-memory", "80", "data.max_response_length=40000") == 2, "beyond the model's context"
    assert command("absent/model/there", "--device-memory", "80") == 2


@pytest.mark.slow
def test_data_tokenizer_and_gpu_are_optional_and_assumptions_are_printed(large, capsys):
    words = ["data.train_files=[data/gsm8k/train.parquet]", "cluster.device=auto"]
    assert command(large, *words, "--device-memory", "800", "--peak-tflops", "300") == 0
    out = capsys.readouterr().out
    assert "no data was read: memory is planned for the longest samples" in out and "GPU with 800.0 GiB" in out
    assert "not found here, required for the run: data/gsm8k/train.parquet: `rlfuse prepare gsm8k`" in out
    assert "lengths default to half the limits; set --response-tokens and --prompt-tokens" in out
    assert "planned for cuda; set cluster.device=cpu to plan for the other" in out
    assert command("absent/model", "--device-memory", "80") == 2
    assert "a plan only needs a folder with the model's config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_phases_peak_and_settings_are_printed(large, tmp_path, capsys):
    picture = tmp_path / "slot.png"
    words = ["model.enable_gradient_checkpointing=true", "actor.zero_stage=3", "--settings"]
    words += ["rollout.max_num_seqs=1024", "rollout.free_cache_engine=true"]
    assert command(large, "--device-memory", "80", "--memory-picture", str(picture), *words) == 0
    out = capsys.readouterr().out
    assert " ".join(PHASES) in " ".join(out.split()) and "peak phase: generating, 54% of the device" in out
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in out and "enable_sleep_mode=True" in out
    assert picture.stat().st_size > 10_000
    assert command(large, "--device-memory", "80", "--memory-picture", "slot.gif") == 2
    assert "--memory-picture slot.gif: the name must end in .png" in capsys.readouterr().err


@pytest.mark.slow
def test_pipeline_schedules_are_plotted(small, tmp_path, capsys):
    words = ["algorithm=ppo", "training.pipeline_parallel_size=2", "rollout.weight_transfer=shm"]
    words += ["data.max_prompt_length=64", "data.max_response_length=64", "trainer.n_gpus_per_node=2"]
    picture = tmp_path / "plan.png"
    assert command(small, "--device-memory", "10", "--peak-tflops", "0.1", "--picture", str(picture), *words) == 0
    assert picture.stat().st_size > 10_000 and "critic layers" in capsys.readouterr().out


@pytest.mark.slow
def test_costs_and_lengths_come_from_a_run(small, tmp_path, capsys, monkeypatch):
    from rlfuse.costs.fit import Accuracy, Fit
    from rlfuse.costs.model import Costs
    from rlfuse.simulate.job_step import workload_of
    from rlfuse.tools.simulate import recorded

    config = job(2)
    config.algorithm.adv_estimator = "grpo"
    accurate = Accuracy(9, 1.0, 0.0, 0.0)
    fit = Fit(Costs(), {kind: accurate for kind in ("decoding", "scoring", "training")})
    workload = workload_of(config, Costs(), 2, (7,) * 256, 11, skipped_share=0.25)
    recording = recorded.Recording("serial", fit, [recorded.Step(1, 0.0, 1.0, workload, [])])
    monkeypatch.setattr(recorded, "read_run", lambda folder: recording)
    words = ["--device-memory", "8", "--from", "run", "data.max_prompt_length=64", "data.max_response_length=64"]
    assert command(small, *words) == 0
    out = capsys.readouterr().out
    assert "responses of 7 tokens on average, 7 at most; prompts of 11 tokens" in out
    assert "25% of the responses" not in out and "not skipped in the actor's passes: actor.use_kl_loss=true" in out
    assert command(small, *words, "actor.use_kl_loss=false") == 0
    assert "25% of the responses have no advantage" in " ".join(capsys.readouterr().out.split())
    recording = replace(recording, fit=Fit(Costs(), {"decoding": accurate}))
    assert command(small, *words) == 2
    assert "the run has no measurements of scoring and training" in capsys.readouterr().err
