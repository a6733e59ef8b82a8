"""vLLM itself, on the embedded model: what it writes and says, served and offline, and a drafter in it.

Slow (each start of vLLM takes most of a minute on a CPU); launch/test_engine.sh runs them.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request

import psutil
import pytest
import torch
import yaml
from helpers import call

from draftkv.recipe import load_recipe
from draftkv.teacher.engine import Request
from draftkv.teacher.engines import open_engine
from draftkv.teacher.engines.serve import engine_environment, server_command
from draftkv.teacher.rollouts import load_rollouts

pytestmark = pytest.mark.engine
WINDOW = {"policy": "swa", "budget": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A recipe of the embedded model in fp32 that drafts for itself, three prompts of up to 300 tokens."""
    folder = tmp_path_factory.mktemp("vllm")
    plain = {
        "name": "run", "output": str(folder / "runs"), "target": {"model": "embedded:smollm2-135m", "dtype": "float32"},
        "prompts": {"train": {"source": "embedded:mixed", "split": "train", "limit": 2},
                    "eval": {"source": "embedded:mixed", "split": "held_out", "limit": 3}, "max_prompt_tokens": 300},
        "rollouts": {"max_new_tokens": 32, "train_temperatures": [0.0, 1.0], "eval_temperatures": [0.0],
                     "dtype": "float32", "batch_size": 4},
        "views": ["full", WINDOW], "signal": {"k": 16},
        "train": {"steps": 1, "rows": 1, "lr": 1e-9, "precision": "no", "trainable": ["layers.0.self_attn.q_proj"]},
        "eval": {"policies": ["full", WINDOW], "rows": 1, "precision": "no"},
        "export": {"dtype": "float32", "checkpoint": "last", "native_window": True},
    }  # fmt: skip
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(plain))
    assert call("data/rollouts.py", file) == 0
    return file


@pytest.fixture(scope="module")
def served(path):
    """A server of the recipe's target, and the words that choose it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ["engine.kind=server", f"engine.url={url}", "engine.concurrency=4"]
    log = path.with_name("server.log")
    with open(log, "w") as file:
        server = subprocess.Popen(server_command(load_recipe(path, words)), stdout=file, stderr=file,
                                  env=engine_environment(), start_new_session=True)  # fmt: skip
    until = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except OSError:
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(1)
    yield words
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def compare(path, words):
    """Texts and signals of an engine, beside those of the target in process."""
    assert call("data/rollouts.py", path, *words) == 0
    own, other = load_recipe(path), load_recipe(path, words)
    ours, theirs = load_rollouts(own, "train"), load_rollouts(other, "train")
    for a, b in zip(ours.rows(0.0), theirs.rows(0.0), strict=True):
        assert a["response_ids"] == b["response_ids"]
        assert b["response_logprobs"] == pytest.approx(a["response_logprobs"], abs=1e-3)
    rows = theirs.rows()
    with open_engine(own) as local, open_engine(other) as engine:
        for want, got in zip(local.score(rows, 49152), engine.score(rows, 49152), strict=True):
            assert got.ids.shape == want.ids.shape
            torch.testing.assert_close(got.logprobs, want.logprobs, atol=2e-3, rtol=0)
            torch.testing.assert_close(got.tail_logprob.exp(), want.tail_logprob.exp(), atol=1e-3, rtol=0)
    assert call("data/signals.py", path, *words) == 0


def test_a_served_target_says_what_it_says_in_process(path, served):
    compare(path, served)


def test_an_offline_target_says_what_it_says_in_process(path):
    compare(path, ["engine.kind=offline"])


def test_a_vllm_whose_own_process_dies_is_started_again(path):
    """The worker lives on then, and could only answer that its engine is dead."""
    recipe = load_recipe(path, ["engine.kind=offline", "engine.retries=1"])
    requests = [Request(row["prompt_ids"], 0.0, 1) for row in load_rollouts(load_recipe(path), "train").rows(0.0)]
    with open_engine(recipe) as engine:
        before = engine.write(requests, 8)
        worker = engine.worker.process
        for child in psutil.Process(worker.pid).children(recursive=True):
            child.kill()
        assert [r.ids for r in engine.write(requests, 8)] == [r.ids for r in before]
        assert engine.worker.process is not worker and worker.poll() is not None


@pytest.fixture(scope="module")
def exported(path):
    assert call("train/distill.py", path) == 0
    return path.parent / "runs" / "run"


def test_the_engines_acceptance_length_is_that_of_replay(path, exported):
    """Target and drafter are the same model: every draft is accepted, and the counts are equal. Under the window the
    counts agree but for near ties."""
    assert call("eval/engine.py", path, "--prompts", "3", "--tokens", "64") == 0
    full, window = (json.loads(line) for line in (exported / "engine.jsonl").read_text().splitlines())
    assert full["engine"] == full["replay_alike"] and full["differs"] is window["differs"] is None
    assert 1 + full["engine"]["accepted"] / full["engine"]["blocks"] == 8
    assert window["engine"]["blocks"] == pytest.approx(window["replay_alike"]["blocks"], rel=0.05)
    assert window["engine"]["blocks"] > full["engine"]["blocks"], "the window binds"


def test_no_acceptance_length_of_an_engine_that_changes_the_output(path, exported, capsys):
    """vLLM 0.32 corrupts the target's cache with a windowed drafter unless its hybrid cache manager is off."""
    records = exported / "engine.jsonl"
    records.unlink(missing_ok=True)
    words = ["engine.options={disable_hybrid_kv_cache_manager: false}", "--prompts", "3", "--tokens", "64",
             "--at-once", "3"]  # fmt: skip
    assert call("eval/engine.py", path, *words) == 1
    window = json.loads(records.read_text().splitlines()[-1])
    assert "texts differ from plain greedy decoding" in window["differs"] and "engine" not in window
    seen = capsys.readouterr()
    assert "no AL of export-native-window" in seen.err and "refused" in seen.out
