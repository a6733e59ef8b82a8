"""vLLM offline: the real worker over its pipes, on a stand-in for the module vllm that answers from a tiny model."""

import json
import stat
import sys
import textwrap

import pytest
import torch
from fake_engine import score
from helpers import call, write_recipe

from draftkv.errors import InputError, RunError
from draftkv.models import load_model
from draftkv.recipe import load_recipe
from draftkv.teacher.engine import Request
from draftkv.teacher.engines import open_engine
from draftkv.teacher.engines.offline import Offline
from draftkv.teacher.engines.serve import engine_environment
from draftkv.teacher.rollouts import load_rollouts

BASE = ["target.dtype=float32", "rollouts.train_temperatures=[0.0, 1.0]", "rollouts.batch_size=8", "signal.k=8"]
FAKE_VLLM = """
    import json, multiprocessing, os, time
    from types import SimpleNamespace as Namespace

    __version__ = "fake"
    HERE = os.path.dirname(__file__)
    MOOD, TABLE = os.path.join(HERE, "mood"), os.path.join(HERE, "table.json")

    class EngineDeadError(Exception):
        pass  # of the process that vLLM runs the model in; this one stays

    def SamplingParams(**values):
        assert values.get("top_p", 1.0) == 1.0 and not values.get("top_k")
        return Namespace(**values)

    class LLM:
        def __init__(self, model, dtype, max_model_len, **options):
            if options.get("tensor_parallel_size", 1) > 1:
                raise ValueError("only one device")
            print("vLLM prints to standard output")
            self.core = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), name="core")
            self.core.daemon = True
            self.core.start()
            self.table = json.load(open(TABLE)) if os.path.exists(TABLE) else {}
            self.llm_engine = Namespace(model_config=Namespace(max_model_len=max_model_len))

        def generate(self, prompts, sampling, use_tqdm):
            mood = open(MOOD).read() if os.path.exists(MOOD) else ""
            if mood.endswith("once"):
                os.remove(MOOD)
            if mood.startswith("dies"):
                print("RuntimeError: the fake is out of memory", flush=True)
                os._exit(7)
            if mood.startswith("orphaned"):
                self.core.kill()
                time.sleep(60)
            if mood.startswith("loses"):
                raise EngineDeadError("EngineCore encountered an issue")
            if mood.startswith("hangs"):
                time.sleep(60)
            results = []
            for index, prompt in enumerate(prompts):
                ids = prompt["prompt_token_ids"]
                how = sampling[index] if isinstance(sampling, list) else sampling
                if getattr(how, "prompt_logprobs", None):
                    entries = [None if p is None else {int(t): Namespace(**e) for t, e in p.items()}
                               for p in self.table[str(ids)]]
                    results.append(Namespace(prompt_token_ids=ids, prompt_logprobs=entries))
                    continue
                count = how.max_tokens
                always = [[9] * count, [-1.0] * count, "length"]
                texts, logprobs, reason = self.table.get(f"{ids}@{how.temperature}", always)
                logprobs = [{i: Namespace(logprob=x)} for i, x in zip(texts, logprobs)]
                text = Namespace(token_ids=texts, logprobs=logprobs, finish_reason=reason)
                results.append(Namespace(prompt_token_ids=ids, outputs=[text]))
            return results[:-1] if mood.startswith("forgets") else results
"""


def write_table(place, rows):
    """What the target in process wrote and says, for the stand-in to repeat."""
    model, table = load_model("rehearsal:llama"), {}
    for row in rows:
        ids = row["prompt_ids"] + row["response_ids"]
        table[f"{row['prompt_ids']}@{row['temperature']}"] = [
            row["response_ids"], row["response_logprobs_t1"], row["finish_reason"]]
        table[str(ids)] = score(model, {"prompt": ids, "prompt_logprobs": 8})["prompt_logprobs"]
    (place / "table.json").write_text(json.dumps(table))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the stand-in, and `python`, which finds it."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "vllm.py").write_text(textwrap.dedent(FAKE_VLLM))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.fixture
def build(tmp_path, place, monkeypatch):
    monkeypatch.setattr(Offline, "first_wait_s", 0.01)
    (place / "mood").unlink(missing_ok=True)
    path = write_recipe(tmp_path)

    def with_words(*others):
        words = [*BASE, "engine.kind=offline", f"engine.python={place}/python", "engine.retries=1", *others]
        return path, words, load_recipe(path, words)

    return with_words


def test_offline_rollouts_and_signals_equal_those_in_process(build, place):
    path, words, recipe = build()
    local_recipe = load_recipe(path, BASE)
    assert call("data/rollouts.py", path, *BASE) == 0
    own = load_rollouts(local_recipe, "train").rows()
    write_table(place, [*own, *load_rollouts(local_recipe, "eval").rows()])
    assert call("data/rollouts.py", path, *words) == 0
    offline = load_rollouts(recipe, "train").rows()
    assert [r["response_ids"] for r in own] == [r["response_ids"] for r in offline] and len(own) == 16
    with open_engine(recipe) as engine, open_engine(local_recipe) as local:
        for got, want in zip(engine.score(own, 512), local.score(own, 512), strict=True):
            assert torch.equal(got.ids, want.ids)
            torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-4, rtol=0)
            torch.testing.assert_close(got.tail_logprob, want.tail_logprob, atol=1e-3, rtol=0)
        assert engine.about["kind"] == "offline" and engine.about["vllm"] == "fake"
        process = engine.worker.process
    assert process.poll() is not None, "it ends with the engine"


@pytest.mark.parametrize("mood, message", [
    ("dies", r"status 7\): RuntimeError: the fake is out of memory.*2 tries"),
    ("loses", r"status 1\): .*EngineDeadError: EngineCore encountered an issue.*2 tries"),
    ("orphaned", r"status 70\): EngineDeadError: vLLM's process core ended.*2 tries"),
    ("hangs", r"no answer in 2 s \(engine.timeout_s\).*2 tries"),
    ("forgets", "1 answers to 2 questions.*2 tries"),
])  # fmt: skip
def test_what_goes_wrong_once_is_mended_and_what_stays_wrong_is_told(build, place, mood, message):
    requests = [Request([5, 6, 7], 1.0, seed) for seed in (1, 2)]
    with open_engine(build("engine.timeout_s=2")[2]) as engine:
        (place / "mood").write_text(f"{mood} once")
        assert len(engine.write(requests, 4)) == 2
        (place / "mood").write_text(mood)
        with pytest.raises(RunError, match=message):
            engine.write(requests, 4)


def test_what_vllm_refuses_is_told_and_not_repeated(build, capsys):
    path, words, _ = build("engine.options={tensor_parallel_size: 2}")
    assert call("data/rollouts.py", path, *words) == 1
    error = capsys.readouterr().err
    assert "vLLM says: ValueError: only one device" in error and error.count("\n") == 1 and "tries" not in error


def test_no_environment_is_one_line_of_advice(build):
    told = "/absent/python: no such Python.*launch/engine_env.sh"
    with open_engine(build("engine.python=/absent/python")[2]) as engine, pytest.raises(InputError, match=told):
        engine.write([Request([5, 6], 0.0, 1)], 4)


def test_an_engine_started_by_a_rank_is_none_itself(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    given = engine_environment()
    assert not [name for name in given if name.startswith(("RANK", "WORLD", "MASTER", "TORCHELASTIC", "ACCELERATE"))]
    assert given["VLLM_CPU_KVCACHE_SPACE"] == "9" and "PATH" in given
