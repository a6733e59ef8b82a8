"""`--plan`: works for every shipped recipe without weights, network or a GPU, and says what it does not know."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT, call

from draftkv.plan import drafter_shape, plan, size
from draftkv.recipe import load_recipe
from draftkv.rehearsal import rehearse, tiny_model
from draftkv.shapes import KNOWN, draft_kv_bytes, from_config, shape_of

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
QUICK = ROOT / "tests/cli/example.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_has_a_plan(path):
    recipe = load_recipe(path)
    text = plan(recipe)
    for policy in recipe.eval.policies:
        assert f"{policy.label}: " in text
    assert recipe.as_yaml().splitlines()[0] in text and "not known at" not in text
    for title in ("models", "stages", "tokens", "memory", "draft cache", "disk"):
        assert f"== {title}" in text


@pytest.mark.parametrize("script", ["data/rollouts.py", "train/distill.py", "train/export.py", "eval/acceptance.py",
                                    "eval/live.py", "eval/report.py", "data/signals.py", "eval/staleness.py",
                                    "eval/fidelity.py", "eval/engine.py"])  # fmt: skip
def test_every_command_has_a_plan_of_every_recipe(script, tmp_path, capsys, monkeypatch):
    """Without weights, network or a trace on the disk."""

    def refuse(*args, **kwargs):
        raise AssertionError("a plan reads no weights and asks no network")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.chdir(tmp_path)
    for path in RECIPES:
        assert call(script, path, "--plan") == 0
        seen = capsys.readouterr()
        assert seen.out and not seen.err
    assert not list(tmp_path.iterdir())


def test_the_engine_is_named(capsys):
    words = ["engine.kind=server", "engine.url=http://node7:8000", "engine.concurrency=32", "target.dtype=float32",
             "rollouts.dtype=float32"]  # fmt: skip
    assert "vLLM, a server at http://node7:8000, 32 requests in flight" in plan(load_recipe(QUICK, words))
    assert "engine     transformers, in the process" in plan(load_recipe(QUICK))
    for script in ("data/rollouts.py", "data/signals.py"):
        assert call(script, QUICK, *words, "--plan") == 0
        assert "engine: vLLM, a server at http://node7:8000" in capsys.readouterr().out


def test_the_papers_setting_has_the_known_figures():
    path = ROOT / "recipes/qwen35_4b.yaml"
    text = plan(load_recipe(path), processes=8)
    for figure in ("32 KiB a token", "full: 1 GiB (32,768 entries)", "swa B=8192: 256 MiB (8,192 entries, 4x less)",
                   "32 layers, 8 of them full attention", "32 rows x (32,768 prompt + 1 views x 4,096)",
                   "in 4 forward passes per process", "signals: at most 1.52 MiB a training row"):
        assert figure in text, figure
    assert "227 GiB" not in text, "training from stored signals loads no target"
    in_process = plan(load_recipe(path, ["signal.source=model"]), processes=8)
    assert "fit no device" in in_process and "227 GiB" in in_process


@pytest.mark.parametrize(
    "launch, each, divided",
    [({}, "16 bytes a parameter", ""), ({"ACCELERATE_USE_FSDP": "true"}, "2 bytes", "weights, gradients, Adam in 8"),
     ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero1.json"}, "9 bytes", "Adam in 8"),
     ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero2.json"}, "5.5 bytes",
      "gradients, Adam in 8"),
     ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "2 bytes", "in 8 parts")],
)  # fmt: skip
def test_memory_is_that_of_the_launch(monkeypatch, launch, each, divided):
    monkeypatch.chdir(ROOT / "launch" / "deepspeed")
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    text = plan(load_recipe(ROOT / "recipes/qwen35_4b.yaml"), processes=8)
    assert each in text and divided in text and ("plain data parallelism" in text) == (not launch)


def test_a_plan_needs_no_network_and_is_quick_to_read(tmp_path):
    code = ("import socket; socket.socket.connect = None; import sys; from draftkv.plan import print_plan;"
            "from draftkv.recipe import load_recipe; print_plan(load_recipe(sys.argv[1]));"
            "assert 'transformers' not in sys.modules, 'slow to import'")
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / "recipes/qwen35_4b.yaml")], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "== memory" in done.stdout and not list(tmp_path.iterdir())


def test_an_unknown_model_is_said_to_be_unknown():
    recipe = load_recipe(QUICK, ["target.model=nobody/nothing-9B", "drafter.model=nobody/nothing-1B"])
    text = plan(recipe)
    assert "nobody/nothing-9B, architecture not known here" in text and "not known  drafter in fp32" in text
    assert "rift_stat B=136 rho=0.5 sinks=4: not known (136 entries" in text
    assert "give a folder with its config.json" in text


def test_evaluations_are_counted_as_the_run_makes_them():
    """At the start, the end, every `eval.every` steps, and at every checkpoint."""
    words = ["train.steps=100", "eval.every=50", "train.checkpoint_every=30"]
    assert "evaluations: 6 x" in plan(load_recipe(QUICK, words)), "0, 30, 50, 60, 90, 100"


def test_limits_and_states_are_reported(tmp_path):
    recipe = load_recipe(QUICK, [f"output={tmp_path}", "prompts.max_prompt_tokens=9000"])
    assert "longer than the target's limit of 8,192" in plan(recipe)
    recipe = load_recipe(QUICK, [f"output={tmp_path}"])
    assert "distill    absent" in plan(recipe)
    (recipe.run_dir / "export").mkdir(parents=True)
    (recipe.run_dir / "export/config.json").write_text("{}")
    for folder in ("step-000020", "step-000040", "best", ".step-000060"):  # one complete, one not, and others
        (recipe.run_dir / "checkpoints" / folder).mkdir(parents=True)
    (recipe.run_dir / "checkpoints/step-000020/state.json").write_text("{}")
    (recipe.run_dir / "checkpoints/.step-000060/state.json").write_text("{}")
    (recipe.run_dir / "acceptance.jsonl").write_text("{}\n{}\n")
    text = plan(recipe)
    assert "would resume from step-000020" in text and "acceptance 2 records" in text and "export     done" in text
    (recipe.run_dir / "done.json").write_text("{}")
    (recipe.run_dir / "recipe.yaml").write_text(load_recipe(QUICK, ["seed=7"]).as_yaml())
    text = plan(recipe)
    assert "distill    done" in text and "differs from this recipe" in text


def test_rows_are_counted_when_they_can_be(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n' * 10)
    recipe = load_recipe(QUICK, [f"prompts.train.source={path}", "prompts.train.split=null", "train.steps=10"])
    text = plan(recipe)
    assert "rollouts: 20 training rows, 2,560 tokens written by the target" in text
    assert "epochs: 2 (10 steps of 4 rows)" in text
    limited = recipe.model_copy(update={"prompts": recipe.prompts.model_copy(
        update={"train": recipe.prompts.train.model_copy(update={"limit": 5})})})
    assert "rollouts: 10 training rows" in plan(limited)


def test_a_rehearsal_has_a_plan_too(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTKV_CACHE", str(tmp_path))
    text = plan(rehearse(load_recipe(ROOT / "recipes/qwen35_4b.yaml")))
    assert "rehearsal:qwen3_5_text@1, qwen3_5_text, " in text and "2 of them full attention" in text


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_counted_parameters_are_the_models_own(name, tmp_path):
    """To within the norms; a saved folder is counted exactly, from its weight files."""
    model = tiny_model(name)
    real = sum(p.numel() for p in model.parameters())
    assert from_config(model.config.to_dict()).params == pytest.approx(real, rel=0.01)
    model.save_pretrained(tmp_path)
    assert shape_of(str(tmp_path)).params == real


def test_shapes_read_layer_kinds_and_nested_configs():
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 8, "full_attention_interval": 4, "hidden_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100}
    shape = from_config({"model_type": "qwen3_5", "text_config": text})
    assert (shape.full_attention_layers, shape.head_dim, shape.vocab) == (2, 32, 100)
    assert draft_kv_bytes(shape, 10) == 2 * 2 * 2 * 32 * 2 * 10
    gemma = from_config({"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]})
    assert gemma.full_attention_layers == 1 and draft_kv_bytes(gemma, 10) is None
    assert draft_kv_bytes(KNOWN["Qwen/Qwen3.5-4B"], 1) == 32 * 1024
    assert shape_of("Qwen/Qwen3-0.6B").params == pytest.approx(0.6e9, rel=0.01)
    assert shape_of("Qwen/Qwen3-8B").params == pytest.approx(8.19e9, rel=0.01)
    assert shape_of("embedded:smollm2-135m").params == pytest.approx(134.5e6, rel=0.01)


def test_a_cut_drafter_counts_its_own_layers():
    shape = drafter_shape(load_recipe(QUICK, ["drafter.layers=[0, 1, 2, 29]"]))
    assert (shape.layers, shape.full_attention_layers) == (4, 4)
    assert shape.params < KNOWN["embedded:smollm2-135m"].params / 2


def test_sizes_are_readable():
    assert [size(x) for x in (None, 0, 512, 32 * 1024, 2**30, 1.5 * 2**40)] == [
        "not known", "0 B", "512 B", "32 KiB", "1 GiB", "1.5 TiB"]
