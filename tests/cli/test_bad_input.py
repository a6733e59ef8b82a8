"""What bad input gets from every command: one line, exit status 2, and no weights loaded.

`tests/cli/test_recipe.py` goes through the mistakes in a recipe's values; here are those that only a command can see
(files, rows, tokens, limits), and that every command says all of them in the same way.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, call, write_recipe

from draftkv import models
from draftkv.rehearsal import model_path

COMMANDS = ["data/rollouts.py", "data/signals.py", "train/distill.py", "train/export.py", "eval/acceptance.py",
            "eval/live.py", "eval/staleness.py", "eval/report.py", "train/sweep.py"]  # fmt: skip
WRITERS = ["data/rollouts.py", "train/distill.py", "train/sweep.py"]  # read prompts and models themselves
HELD_OUT = ["eval/acceptance.py", "eval/live.py"]  # read the held-out prompts, to find their rollouts
SPEED_BENCH = {"question_id": 1, "turns": ["a"], "category": "coding", "source": "x", "src_id": "y", "difficulty": None}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch, tmp_path):
    """Any attempt to load weights fails the test, and so does one to launch a point of a sweep."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("draftkv.sweep.run_logged", refuse)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory) -> Path:
    """A drafter's folder, without weights, in which two tokens have changed places."""
    folder = tmp_path_factory.mktemp("other") / "tokens"
    shutil.copytree(model_path("rehearsal:llama"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def changed_config(folder: Path, **keys) -> Path:
    """A drafter's folder, without weights, with other values in its config.json."""
    shutil.copytree(model_path("rehearsal:llama"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def arguments(script: str, folder: Path, *overrides: str) -> list[str]:
    """A command's arguments over a tiny recipe: the recipe, or a sweep of one point over it."""
    recipe = write_recipe(folder)
    if script == "train/sweep.py":
        recipe = folder / "sweep.yaml"
        recipe.write_text(yaml.safe_dump({"name": "s", "base": "recipe.yaml", "grid": {"seed": [0]}}))
    return [str(recipe), *overrides]


def refused(capsys, script: str, words: list[str]) -> str:
    """The one line that a command leaves with, and status 2."""
    status = call(script, *words)
    seen = capsys.readouterr()
    lines = seen.err.splitlines()
    assert (status, len(lines)) == (2, 1), (status, seen.err, seen.out)
    assert lines[0].startswith("error: ") and seen.out == ""
    return lines[0]


VALUES = [
    (["train.stepz=3"], "train.stepz: unknown key; did you mean 'steps'?"),
    (["views.1.sink=3"], "views.1.sink: unknown key; did you mean 'sinks'?"),
    (["train.steps=many"], "train.steps: Input should be a valid integer"),
    (["views.1={policy: rift_stat, budget: 8, rho: 1.5}"], "views.1.rho: Input should be less than or equal to 1"),
    (["eval.policies.1={policy: streaming, budget: 4}"], "eval.policies.1: budget 4 is smaller than sinks + 1 = 5"),
    (["eval.draft_length=0"], "eval.draft_length: Input should be greater than or equal to 1"),
    (["drafter.attention=flash"], "drafter.attention: 'flash' "),
    (["drafter.model=Qwen/Qwen3-0.6B", "export.native_window=true"], "native window: engines ignore"),
]


@pytest.mark.parametrize("script", COMMANDS)
def test_every_command_refuses_bad_values(script, tmp_path, capsys):
    for overrides, message in VALUES:
        assert message in refused(capsys, script, arguments(script, tmp_path, *overrides)), overrides
    assert not (tmp_path / "runs").exists(), "nothing is written for a recipe that is refused"


@pytest.mark.parametrize("script", COMMANDS)
def test_every_command_refuses_bad_words(script, tmp_path, capsys):
    words = arguments(script, tmp_path)
    assert "no such" in refused(capsys, script, ["gone.yaml"])
    assert "unrecognized arguments: --plann; see --help" in refused(capsys, script, [*words, "--plann"])
    assert "are required" in refused(capsys, script, [])
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "latin.yaml: not " in refused(capsys, script, ["latin.yaml"])
    assert call(script, "--help") == 0 and capsys.readouterr().out.startswith("usage: ")


SOURCES = [
    ([{"text": "good"}, "{no json"], "rows.jsonl:2: not a line of JSON"),
    ([{"text": "good"}, {"question": "what?"}], "rows.jsonl:2: needs `messages`"),
    ([{"text": "good"}, {"messages": [{"role": "user"}]}], "rows.jsonl:2: messages: every message is an object"),
    ([], "rows.jsonl: no usable prompt in this data set (it has no rows)"),
    ([{"text": " "}], "no usable prompt in this data set (1 empty)"),
    (None, "rows.jsonl: no such file"),
]


def write_rows(rows: list | None) -> str:
    if rows is not None:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        Path("rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    else:
        Path("rows.jsonl").unlink(missing_ok=True)
    return "rows.jsonl"


@pytest.mark.parametrize("script", [*WRITERS, *HELD_OUT])
def test_bad_prompts(script, tmp_path, capsys):
    """Held-out prompts too, and before the training rollouts are written."""
    if script in HELD_OUT:
        shutil.copytree(model_path("rehearsal:llama"), tmp_path / "export")
    drafter = [f"--drafter={tmp_path}/export"] if script in HELD_OUT else []
    for rows, message in SOURCES:
        source = write_rows(rows)
        for split in ("eval",) if script in HELD_OUT else ("train", "eval"):
            words = arguments(script, tmp_path, f"prompts.{split}.source={source}", *drafter)
            assert message in refused(capsys, script, words), (split, message)
    assert not list(tmp_path.glob("runs/*/recipe.yaml")), "a refused recipe may be mended under its own name"


@pytest.mark.parametrize("script", WRITERS)
def test_speed_bench_is_not_for_training(script, tmp_path, capsys):
    for source in (write_rows([SPEED_BENCH]), "nvidia/SPEED-Bench"):
        line = refused(capsys, script, arguments(script, tmp_path, f"prompts.train.source={source}"))
        assert "SPEED-Bench, which is licensed for evaluation only" in line


@pytest.mark.parametrize("script", [*WRITERS, *HELD_OUT])
def test_a_pair_that_does_not_fit(script, tmp_path, capsys, other_tokens):
    short = changed_config(tmp_path / "short", max_position_embeddings=100)
    opt = changed_config(tmp_path / "opt", model_type="opt")
    capped = changed_config(tmp_path / "capped", model_type="gemma3_text", final_logit_softcapping=30.0)
    for drafter, message in [
        (other_tokens, "target and drafter disagree on token 40: "),
        (short, "short: prompts.max_prompt_tokens + rollouts.max_new_tokens = 216 tokens, but this model's limit is"),
        (opt, "cache policies are not proven on 'opt'; supported: Llama, Qwen3"),
        (capped, "models with soft-capped logits are not supported"),
        (tmp_path / "gone", "no such folder"),
        (tmp_path, "this folder holds no model (no config.json)"),
    ]:  # fmt: skip
        words = arguments(script, tmp_path)
        words.append(f"--drafter={drafter}" if script in HELD_OUT else f"drafter.model={drafter}")
        assert message in refused(capsys, script, words), drafter
    words = arguments(script, tmp_path, "prompts.max_prompt_tokens=1009")
    words += [f"--drafter={model_path('rehearsal:llama')}"] if script in HELD_OUT else []
    assert "= 1025 tokens, but this model's limit is 1024" in refused(capsys, script, words)


@pytest.mark.parametrize("overrides", [
    (["drafter.model=null", "drafter.layers=[1, 9]"], "drafter.layers [1, 9]: rehearsal:llama has layers 0 to 2"),
    (["train.trainable=[no_such_part]"], "train.trainable ['no_such_part']: matches no parameter of the drafter"),
    (["drafter.model=rehearsal:qwen3", "export.native_window=true"], "engines ignore the drafter's on 'qwen3'"),
], ids=lambda v: v[0][-1])  # fmt: skip
def test_what_a_drafter_does_not_have_shows_before_the_rollouts(overrides, tmp_path, capsys):
    words, message = overrides
    assert message in refused(capsys, "train/distill.py", arguments("train/distill.py", tmp_path, *words))
    assert not (tmp_path / "runs").exists()


def test_commands_that_come_too_early_say_what_to_run_first(tmp_path, capsys):
    for script, message in [
        ("train/export.py", "nothing to export yet; run train/distill.py"),
        ("eval/acceptance.py", "nothing is exported yet; run train/distill.py with this recipe or give --drafter"),
        ("eval/live.py", "nothing is exported yet; run train/distill.py"),
        ("eval/report.py", "acceptance.jsonl: no such file"),
    ]:
        assert message in refused(capsys, script, arguments(script, tmp_path))
    for script in HELD_OUT:
        words = [*arguments(script, tmp_path), f"--drafter={model_path('rehearsal:llama@1')}"]
        assert "the eval rollouts of this recipe have not been written" in refused(capsys, script, words)
    words = arguments("eval/live.py", tmp_path)
    assert "--prompts 0: at least 1" in refused(capsys, "eval/live.py", [*words, "--prompts=0"])
    assert "--temperature 2: the recipe has [0.0]" in refused(capsys, "eval/live.py", [*words, "--temperature=2"])
    assert "invalid int value: 'x'" in refused(capsys, "eval/live.py", [*words, "--prompts=x"])
    line = refused(capsys, "train/export.py", [*words, "--native-window", "eval.select=0"])
    assert "native window: 'full' is not a plain window" in line or "nothing to export yet" in line


def test_a_mended_recipe_is_not_a_changed_one(tmp_path, capsys, monkeypatch):
    """A run that was refused has not begun: the folder belongs to no recipe yet."""
    refused(capsys, "train/distill.py", arguments("train/distill.py", tmp_path, "prompts.eval.source=gone.jsonl"))
    monkeypatch.setattr(models, "load_model", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert call("train/distill.py", *arguments("train/distill.py", tmp_path)) == 130
    assert capsys.readouterr().err == "error: interrupted; the same command goes on from what is saved\n"
    assert "prompts.eval.limit was 2" in refused(
        capsys, "train/distill.py", arguments("train/distill.py", tmp_path, "prompts.eval.limit=3"))  # fmt: skip


@pytest.mark.parametrize("script", ["train/distill.py", "train/sweep.py"])
def test_a_process_of_its_own(script, tmp_path):
    """As a user sees it: nothing of the interpreter or of a library on stderr either."""
    words = arguments(script, tmp_path, "prompts.eval.source=gone.jsonl")
    done = subprocess.run([sys.executable, str(ROOT / script), *words], cwd=tmp_path, text=True, capture_output=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.endswith("gone.jsonl: no such file\n")
    assert len(done.stderr.splitlines()) == 1
