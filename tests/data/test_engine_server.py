"""A served target: good answers give what the target in process gives, and every bad one is detected, not stored."""

import copy
import json
import threading
import time

import pytest
import torch
from fake_engine import FakeEngine
from helpers import call, write_recipe

from draftkv.errors import InputError, RunError
from draftkv.models import load_tokenizer
from draftkv.recipe import load_recipe
from draftkv.teacher.engine import Request
from draftkv.teacher.engines import open_engine
from draftkv.teacher.engines.serve import weights_name
from draftkv.teacher.engines.server import Server
from draftkv.teacher.rollouts import load_rollouts
from draftkv.teacher.signal_store import SignalPlan, StoredTeacher

MODEL = "rehearsal:llama"
BASE = ["target.dtype=float32", "rollouts.train_temperatures=[0.0, 1.0]", "rollouts.batch_size=3", "signal.k=8"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(Server, "first_wait_s", 0.01)


@pytest.fixture(scope="module")
def engine():
    with FakeEngine(MODEL) as fake:
        yield fake


@pytest.fixture
def fake(engine):
    engine.fault, engine.pause, engine.peak, cards = None, 0.0, 0, copy.deepcopy(engine.cards)
    engine.asked.clear()
    yield engine
    while engine.work:  # a request that its client gave up would be counted in the next test
        time.sleep(0.01)
    engine.fault, engine.pause, engine.cards = None, 0.0, cards


def words(fake, *others):
    return [*BASE, "engine.kind=server", f"engine.url={fake.url}", "engine.retries=2", *others]


@pytest.fixture
def path(tmp_path):
    return write_recipe(tmp_path)


def recipe_of(path, fake, *others):
    return load_recipe(path, words(fake, *others))


def a_row(path, fake):
    """A rollout row, written by the target in process, and its recipe."""
    recipe = load_recipe(path, BASE)
    tokenizer = load_tokenizer(MODEL)
    prompt = tokenizer.encode("alpha beta gamma delta epsilon zeta")
    with open_engine(recipe) as local:
        found = local.write([Request(prompt, 1.0, 5)], 12)[0]
    return {"row_id": "r", "temperature": 1.0, "prompt_ids": prompt, "response_ids": found.ids,
            "response_logprobs_t1": found.logprobs_t1}  # fmt: skip


def test_served_rollouts_and_signals_equal_those_in_process(path, fake):
    assert call("data/rollouts.py", path, *BASE) == 0
    assert call("data/rollouts.py", path, *words(fake)) == 0
    recipe = recipe_of(path, fake)
    own, served = load_rollouts(load_recipe(path, BASE), "train"), load_rollouts(recipe, "train")
    assert own.key != served.key and len(served.rows()) == 16
    for a, b in zip(own.rows(), served.rows(), strict=True):
        assert a["response_ids"] == b["response_ids"] and a["finish_reason"] == b["finish_reason"]
        for name in ("response_logprobs", "response_logprobs_t1"):
            assert b[name] == pytest.approx(a[name], abs=1e-4)
    assert call("data/signals.py", path, *words(fake)) == 0
    plan = SignalPlan.of(recipe, served, 512)
    stored = StoredTeacher(plan, 1.0, torch.device("cpu"))
    with open_engine(load_recipe(path, BASE)) as local, open_engine(recipe) as server:
        for row, want, got in zip(plan.rows, local.score(plan.rows, 512), server.score(plan.rows, 512), strict=True):
            assert torch.equal(got.ids, want.ids) and len(got) == len(row["response_ids"]) - 1
            torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-4, rtol=0)
            torch.testing.assert_close(got.tail_logprob, want.tail_logprob, atol=1e-3, rtol=0)
            assert torch.equal(stored.read(row).ids, want.ids)
    assert '"kind": "server"' in (served.path / "manifest.json").read_text()
    assert '"vllm": "fake"' in (plan.folder / "manifest.json").read_text()
    assert not any(b["top_p"] != 1 or b["top_k"] or b["repetition_penalty"] != 1 for b in fake.asked)


# ------------------------------------------------------------------------------------------------ bad scored answers


def on_positions(change):
    """A fault of scored answers: `change` gets the list of positions and the length of the prompt, and edits it."""

    def fault(path, body, answer):
        if path == "/v1/completions":
            change(answer["choices"][0]["prompt_logprobs"])
        return answer

    return fault


def edit(place, change):
    """A fault of the entries at one position, counted from the end: a list of (token, entry)."""

    def on(positions):
        positions[place] = dict(change(list(positions[place].items())))

    return on_positions(on)


def at(rank, entries):
    return next(i for i, (_, entry) in enumerate(entries) if entry["rank"] == rank)


def swapped(entries):
    a, b = entries[at(1, entries)][1], entries[at(2, entries)][1]
    a["logprob"], b["logprob"] = b["logprob"], a["logprob"]
    return entries


def with_logprob(value, rank=1):
    def change(entries):
        entries[at(rank, entries)][1]["logprob"] = value
        return entries

    return change


def twice(entries):
    entry, rest = entries[at(8, entries)][1], [e for e in entries if e[1]["rank"] != 8]
    best = rest[at(1, rest)][0]
    return [*rest, (f"0{best}", entry)]


def renamed(token):
    return lambda entries: [(token if entry["rank"] == 1 else t, entry) for t, entry in entries]


def doubled(positions):
    """A model that is not the target: every log-probability is of some other distribution."""
    for entries in positions[1:]:
        for entry in entries.values():
            entry["logprob"] -= 2.0


BAD_SCORES = {
    "short": (on_positions(lambda p: p.pop()), "positions for"),
    "empty": (on_positions(lambda p: p.clear()), "0 positions"),
    "shifted back": (on_positions(lambda p: p.insert(1, p.pop())), "fed"),
    "shifted on": (on_positions(lambda p: p.append(p.pop(1))), "fed"),
    "no null first": (on_positions(lambda p: p.__setitem__(0, p[1])), "expected the first"),
    "null later": (on_positions(lambda p: p.__setitem__(-2, None)), "expected the first"),
    "null first and shifted": (on_positions(lambda p: (p.insert(0, None), p.pop())), "expected the first"),
    "too few entries": (edit(-1, lambda e: [x for x in e if x[1]["rank"] != 3]), "log-probabilities|not of the token"),
    "misordered": (edit(-1, swapped), "order of their ranks"),
    "ranks with a gap": (edit(-1, lambda e: [(t, x | {"rank": x["rank"] + 1}) for t, x in e]), "ranks"),
    "a token twice": (edit(-1, twice), "listed twice|not of the token"),
    "positive": (edit(-1, with_logprob(0.7)), "not a number up to 0"),
    "not a number": (edit(-1, with_logprob(float("nan"))), "not a number up to 0"),
    "no number": (edit(-1, with_logprob(None)), "without log-probabilities|not a number"),
    "too much mass": (edit(-1, lambda e: [(t, x | {"logprob": -0.1 * x["rank"]}) for t, x in e]), "sum to"),
    "past the vocabulary": (edit(-1, renamed("99999")), "past the 512|not of the token"),
    "another model": (on_positions(doubled), "not of the target"),
    "no form at all": (lambda *a: a[2] if a[0] != "/v1/completions" else {"choices": [{"text": "x"}]}, "without"),
    "two choices": (lambda *a: a[2] if a[0] != "/v1/completions" else {"choices": [{}, {}]}, "one completion"),
    "no JSON": (lambda *a: a[2] if a[0] != "/v1/completions" else b"<html>", "JSON"),
    "status 500": (lambda *a: a[2] if a[0] != "/v1/completions" else 500, "status 500: as told"),
    "status 429": (lambda *a: a[2] if a[0] != "/v1/completions" else 429, "status 429"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_a_bad_signal_is_asked_for_again_and_then_refused(kind, path, fake):
    fake.fault, message = BAD_SCORES[kind]
    with open_engine(recipe_of(path, fake)) as server, pytest.raises(RunError, match=f"row r at.*({message}).*3 tries"):
        server.score([a_row(path, fake)], 512)
    assert len(fake.asked) == 3


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_one_bad_signal_among_good_ones_does_no_harm(kind, path, fake):
    bad, row = BAD_SCORES[kind][0], a_row(path, fake)
    fake.fault = lambda *a: bad(*a) if len(fake.asked) == 1 else a[2]
    with open_engine(recipe_of(path, fake)) as server, open_engine(load_recipe(path, BASE)) as local:
        got, want = server.score([row], 512)[0], local.score([row], 512)[0]
    assert torch.equal(got.ids, want.ids) and len(fake.asked) == 2
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------- bad written answers


def on_choice(change):
    def fault(path, body, answer):
        if path == "/v1/completions":
            change(answer["choices"][0])
        return answer

    return fault


def cut(choice):
    for values in (choice["token_ids"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]):
        values.pop()


def endless(choice):
    for values, more in ((choice["token_ids"], 7), (choice["logprobs"]["tokens"], "token_id:7"),
                         (choice["logprobs"]["token_logprobs"], -1.0)):  # fmt: skip
        values += [more] * 30


def outside(choice):
    choice["token_ids"][0], choice["logprobs"]["tokens"][0] = 99999, "token_id:99999"


BAD_TEXTS = {
    "cut short": (cut, "stopped by length after|it ended for the reason 'stop'"),
    "too long": (endless, "were asked for"),
    "of another prompt": (lambda c: c.update(prompt_token_ids=[1, 2]), "another prompt"),
    "past the vocabulary": (outside, "none of the tokenizer's"),
    "other tokens": (lambda c: c["logprobs"]["tokens"].reverse(), "other tokens"),
    "fewer log-probabilities": (lambda c: c["logprobs"]["token_logprobs"].pop(), "log-probabilities"),
    "null log-probability": (lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, None), "not a number up to 0"),
    "another reason": (lambda c: c.update(finish_reason="abort"), "reason 'abort'"),
    "no ids": (lambda c: c.pop("token_ids"), "without token ids"),
}


@pytest.mark.parametrize("kind", BAD_TEXTS)
def test_a_bad_text_is_asked_for_again_and_then_refused(kind, path, fake):
    change, message = BAD_TEXTS[kind]
    fake.fault = on_choice(change)
    told = f"request 0.*({message}).*3 tries"
    with open_engine(recipe_of(path, fake)) as server, pytest.raises(RunError, match=told):
        server.write([Request([5, 6, 7, 8], 1.0, 1)], 12)
    assert len(fake.asked) == 3


# ------------------------------------------------------------------------------------------- servers that misbehave


def test_a_request_that_can_never_be_answered_is_not_repeated(path, fake):
    fake.fault = lambda *a: 400 if a[0] == "/v1/completions" else a[2]
    with open_engine(recipe_of(path, fake)) as server, pytest.raises(RunError, match="status 400: as told"):
        server.write([Request([5, 6], 0.0, 1)], 4)
    assert len(fake.asked) == 1


def test_a_server_that_hangs_is_left_and_the_others_with_it(path):
    with FakeEngine(MODEL) as own:
        recipe = recipe_of(path, own, "engine.timeout_s=0.4", "engine.retries=1")
        with open_engine(recipe) as server:
            server.write([Request([5, 6], 0.0, 1)], 4)
            own.pause, began = 3.0, time.monotonic()
            with pytest.raises(RunError, match=r"no answer in 0.4 s \(2 tries\).*same command goes on"):
                server.write([Request([5, 6], 0.0, 1)] * 4, 4)
        assert time.monotonic() - began < 2


def test_nothing_at_the_address_is_one_line(path, fake, capsys):
    with FakeEngine(MODEL) as gone:
        url = gone.url
    assert call("data/rollouts.py", path, *words(fake, f"engine.url={url}")) == 1
    error = capsys.readouterr().err
    assert "refused" in error and "3 tries" in error and "same command goes on" in error and error.count("\n") == 1


@pytest.mark.parametrize("card, message", [
    ([{"id": "other/model", "root": "other/model"}], "serves other/model, not rehearsal:llama"),
    ([], "serves nothing"),
    ([{"id": MODEL, "max_model_len": 216}], "max_model_len is 216; this recipe needs 217"),
    ([{"id": MODEL}, {"id": "weights:0123456789abcdef"}], "serves other weights"),
])  # fmt: skip
def test_a_server_of_something_else_is_refused(path, fake, card, message, capsys):
    fake.cards = card
    assert call("data/rollouts.py", path, *words(fake)) == 2
    assert message in capsys.readouterr().err and not fake.asked


def test_another_tokenizer_is_refused(path, fake, capsys):
    fake.fault = lambda *a: {"tokens": [1, 2, 3]} if a[0] == "/tokenize" else a[2]
    assert call("data/rollouts.py", path, *words(fake)) == 2
    assert "its tokenizer is not" in capsys.readouterr().err


def test_weights_and_names_that_fit_are_taken(path, fake):
    recipe = recipe_of(path, fake, "engine.model=mine")
    fake.cards = [{"id": "mine"}, {"id": weights_name(recipe.target)}]
    with open_engine(recipe) as server:
        assert len(server.write([Request([5, 6], 0.0, 1)], 4)) == 1
        assert server.about["model"] == "mine" and server.about["weights"] == weights_name(recipe.target)
    assert fake.asked[0]["model"] == "mine"


def test_no_more_requests_are_in_flight_than_allowed(path, fake):
    fake.pause = 0.05
    with open_engine(recipe_of(path, fake, "engine.concurrency=3")) as server:
        requests = [Request([5, 6, i], 1.0, i) for i in range(9)]
        found = server.write(requests, 4)
    assert fake.peak == 3
    with open_engine(load_recipe(path, BASE)) as local:
        assert [r.ids for r in found] == [local.write([r], 4)[0].ids for r in requests], "in the order asked"


def test_a_server_that_dies_midway_loses_nothing_and_repeats_nothing(path, fake):
    assert call("data/rollouts.py", path, *words(fake)) == 0
    whole = load_rollouts(recipe_of(path, fake), "train").rows()
    fake.asked.clear()
    output = f"output={path.parent / 'again'}"
    fake.fault = lambda *a: 503 if len(fake.asked) > 7 else a[2]
    assert call("data/rollouts.py", path, *words(fake, output, "engine.concurrency=1")) == 1
    first = [b["seed"] for b in fake.asked[:6]]  # two batches of three were on the disk
    fake.fault = None
    fake.asked.clear()
    assert call("data/rollouts.py", path, *words(fake, output)) == 0
    assert load_rollouts(recipe_of(path, fake, output), "train").rows() == whole
    assert len(fake.asked) == 10 + 2, "what is left of the training rollouts, then the held-out ones"
    assert not set(first) & {b["seed"] for b in fake.asked[:10]}


def test_one_failure_ends_a_batch_while_other_requests_wait_for_answers(path, fake):
    begun, slow = threading.Event(), threading.Event()

    def fault(path, body, answer):
        if path != "/v1/completions":
            return answer
        if body["seed"] == 1:
            return begun.wait(60) and 503
        begun.set()
        return slow.wait(60) and answer

    fake.fault = fault
    try:
        refused = pytest.raises(RunError, match="request 1 of the batch: status 503")
        with open_engine(recipe_of(path, fake, "engine.concurrency=2", "engine.retries=0")) as server, refused:
            server.write([Request([5, 6, i], 0.0, i) for i in range(6)], 4)
        assert {body["seed"] for body in fake.asked} == {0, 1}, "nothing was sent after the failure"
    finally:
        slow.set()


def test_signals_go_on_after_a_server_died(path, fake, monkeypatch):
    from draftkv.teacher import signal_store

    monkeypatch.setattr(signal_store, "SHARD_ROWS", 4)
    assert call("data/rollouts.py", path, *words(fake)) == 0
    recipe = recipe_of(path, fake)
    plan = SignalPlan.of(recipe, load_rollouts(recipe, "train"), 512)
    fake.asked.clear()
    fake.fault = lambda *a: 503 if len(fake.asked) > 5 else a[2]
    assert call("data/signals.py", path, *words(fake, "engine.concurrency=1")) == 1
    assert plan.file(0).is_file() and not (plan.folder / "manifest.json").exists()
    fake.fault = None
    fake.asked.clear()
    assert call("data/signals.py", path, *words(fake)) == 0
    assert len(fake.asked) == 12, "the shard on the disk is not asked for again"
    assert len(StoredTeacher(plan, 1.0, torch.device("cpu")).places) == 16


# ------------------------------------------------------------------------------------------------------- the recipe


@pytest.mark.parametrize("others, message", [
    (["rollouts.train_temperatures=[0.7]"], "rollouts.train_temperatures 0.7.*use 'transformers'"),
    (["signal.temperature=2.0", "loss=[{name: tv, temperature: 2.0}]"], "signal.temperature"),
    (["signal.samples=9"], "signal.samples need 'transformers'"),
    (["rollouts.dtype=bfloat16"], "rollouts.dtype bfloat16, target.dtype float32"),
    (["engine.url=somewhere:80"], "engine.url"),
    (["engine.kind=vllm"], "engine.kind"),
    (["engine.retry=3"], "did you mean 'retries'"),
    (["engine.options={dtype: float16}"], "engine.options.*dtype is set by target.dtype"),
    (["engine.options={max_model_len: 9}"], "engine.options.*max_model_len is set by prompts.max_prompt_tokens"),
    (["engine.options={hf_token: x}"], "engine.options.*hf_token is set by the environment"),
    (["engine.options={max-num-seqs: 9}"], "engine.options.*max-num-seqs: write it as max_num_seqs"),
])  # fmt: skip
def test_what_a_server_cannot_do_is_refused_when_the_recipe_is_read(path, fake, others, message):
    with pytest.raises(InputError, match=message):
        recipe_of(path, fake, *others)


def test_where_the_engine_runs_is_no_ingredient_but_vllm_is(path, fake):
    from draftkv.rundir import first_change
    from draftkv.teacher.rollouts import plan_rollouts

    moved = ["engine.url=http://node7:8000", "engine.retries=9", "engine.options={seed: 1}"]
    local, served, elsewhere, offline = (
        load_recipe(path, [*BASE, *w]) for w in ([], words(fake), [*words(fake), *moved], ["engine.kind=offline"]))
    keys = [plan_rollouts(r)["train"].key for r in (local, served, elsewhere, offline)]
    assert keys[0] != keys[1] == keys[2] == keys[3]
    plain = [r.model_dump(mode="json") for r in (local, served, elsewhere)]
    assert first_change(plain[1], plain[2]) is None and "engine.kind" in first_change(plain[0], plain[1])


def test_options_that_make_another_model_of_the_target_make_another_store(path, fake):
    from draftkv.rundir import first_change
    from draftkv.teacher.rollouts import plan_rollouts

    given = ({}, {"tensor_parallel_size": 8, "num_gpu_blocks_override": 9}, {"quantization": "fp8"},
             {"kv_cache_dtype": "fp8", "max_num_seqs": 4}, {"load_format": "dummy"})  # fmt: skip
    recipes = [recipe_of(path, fake, f"engine.options={json.dumps(options)}") for options in given]
    keys = [plan_rollouts(r)["train"].key for r in recipes]
    assert keys[0] == keys[1] and len(set(keys)) == 4
    plain = [r.model_dump(mode="json") for r in recipes]
    assert first_change(plain[0], plain[1]) is None and first_change(plain[1], plain[0]) is None
    assert "engine.options.quantization" in first_change(plain[1], plain[2])


def test_the_servers_command_comes_from_the_recipe(path, fake, monkeypatch):
    from draftkv.teacher.engines.serve import server_command

    options = "engine.options={tensor_parallel_size: 8, enforce_eager: false, hf_overrides: {a: 1}}"
    recipe = recipe_of(path, fake, "engine.url=http://node7:9000", options, f"engine.python={__file__}")
    command = " ".join(server_command(recipe))
    for part in ("--host node7 --port 9000", f"--served-model-name rehearsal:llama {weights_name(recipe.target)}",
                 "--dtype float32", "--max-model-len 217", "--max-logprobs 8", "--tensor-parallel-size 8",
                 "--no-enforce-eager", '--hf-overrides {"a": 1}', "--generation-config vllm"):  # fmt: skip
        assert part in command, part
    with pytest.raises(InputError, match=r"\+ 1 = 1025, but this model's limit is 1024"):
        server_command(recipe_of(path, fake, "prompts.max_prompt_tokens=1008", f"engine.python={__file__}"))
    with pytest.raises(InputError, match="engine.url http://node7: no port to listen on.*http://node7:8000"):
        server_command(recipe_of(path, fake, "engine.url=http://node7", f"engine.python={__file__}"))
    with pytest.raises(InputError, match="no such Python.*engine_env.sh"):
        server_command(recipe_of(path, fake, "engine.python=/absent"))
