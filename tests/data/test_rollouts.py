"""The target's responses and the store that holds them."""

import json
import math
import os
import shutil

import pytest
import torch
from helpers import call

from draftkv import models
from draftkv.errors import InputError
from draftkv.recipe import Recipe
from draftkv.teacher import rollouts
from draftkv.teacher.engine import Engine, Request, batches, choose, repeated_share, stop_ids

TEXTS = ["the user", "def function(argument): return argument and this and that", "that and this", "speak of", "a b c"]


@pytest.fixture
def recipe(tiny_llama_dir, write_jsonl, tmp_path):
    """Builds a recipe over the tiny model; keyword arguments override whole sections."""

    def build(**sections) -> Recipe:
        source = {"source": write_jsonl([{"prompt": text, "category": "short"} for text in TEXTS])}
        plain = {
            "name": "tiny", "output": str(tmp_path / "runs"), "target": {"model": str(tiny_llama_dir)},
            "prompts": {"train": source, "eval": source, "max_prompt_tokens": 128},
            "rollouts": {"max_new_tokens": 12, "batch_size": 2, "dtype": "float32", "train_temperatures": [0.0, 1.0]},
            "views": ["full"], "eval": {"policies": ["full"]},
        }  # fmt: skip
        return Recipe.model_validate({**plain, **sections})

    return build


@pytest.fixture(scope="module")
def engine(tiny_llama_dir) -> Engine:
    tokenizer = models.load_tokenizer(str(tiny_llama_dir))
    model = models.load_model(str(tiny_llama_dir))
    return Engine(model, len(tokenizer), stop_ids(model, tokenizer))


def requests(temperature: float) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 17, 40, 9]
    return [
        Request(torch.randint(3, 300, (n,), generator=generator).tolist(), temperature, seed=n) for n in lengths
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_a_batch_equals_its_rows_one_by_one(engine, temperature):
    together = engine.write(requests(temperature), 24)
    for request, response in zip(requests(temperature), together, strict=True):
        alone = engine.write([request], 24)[0]
        assert alone.ids == response.ids and alone.finish_reason == response.finish_reason
        torch.testing.assert_close(alone.logprobs, response.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_equal_a_teacher_forced_forward(engine, temperature):
    for request, response in zip(requests(temperature), engine.write(requests(temperature), 24), strict=True):
        full = torch.tensor([request.prompt_ids + response.ids])
        with torch.no_grad():
            logits = engine.model(full).logits[0, len(request.prompt_ids) - 1 : -1].float()
        emitted = torch.tensor(response.ids)[:, None]
        at_1 = torch.log_softmax(logits, -1).gather(1, emitted)[:, 0]
        at_t = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, emitted)[:, 0]
        torch.testing.assert_close(torch.tensor(response.logprobs_t1), at_1, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(response.logprobs), at_t, atol=1e-4, rtol=0)
        if temperature == 0:
            assert response.ids == logits.argmax(-1).tolist()


def test_the_stop_token_is_kept_and_ends_its_row_only(engine):
    free = engine.write(requests(0.0), 24)
    assert all(len(r.ids) == 24 and r.finish_reason == "length" for r in free if not set(r.ids) & engine.stops)
    stop = free[1].ids[7]
    stopping = Engine(engine.model, len(engine.head_weight), {stop})
    for before, after in zip(free, stopping.write(requests(0.0), 24), strict=True):
        cut = before.ids.index(stop) + 1 if stop in before.ids else 24
        assert after.ids == before.ids[:cut]
        assert after.finish_reason == ("stop" if stop in before.ids else "length")
        assert len(after.logprobs) == len(after.logprobs_t1) == cut


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -math.inf]]).expand(20000, -1)
    draws = torch.rand(20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, logprobs, logprobs_t1 = choose(logits, torch.full((20000,), 0.5), draws)
    expected = torch.softmax(logits[0] / 0.5, -1)
    torch.testing.assert_close(tokens.bincount(minlength=4) / 20000, expected, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs.exp(), expected[tokens])
    torch.testing.assert_close(logprobs_t1.exp(), torch.softmax(logits[0], -1)[tokens])
    edge = choose(logits[:1], torch.ones(1), torch.tensor([1 - 1e-16], dtype=torch.float64))[0]
    assert edge.item() == 2, "a token of probability 0 is never drawn"


def test_batches_and_repetition():
    sized = [Request([1] * n, 0.0, 0) for n in (3, 9, 5, 7, 1)]
    assert list(batches(sized, 2)) == [[1, 3], [2, 0], [4]]
    assert repeated_share([1, 2, 3] * 10, 3) == pytest.approx(25 / 28)
    assert repeated_share([1, 2, 3], 8) == 0 and repeated_share(list(range(50)), 8) == 0


def test_store_round_trip(recipe):
    built = recipe()
    with pytest.raises(InputError, match="have not been written.*data/rollouts.py"):
        rollouts.load_rollouts(built, "train")
    store = rollouts.ensure_rollouts(built, "train", progress=False)
    assert set(store.dataset.column_names) == set(rollouts.FEATURES)
    assert store.counts == {"used": 10, "skipped": {}} and len(store.rows()) == 10 and len(store.rows(1.0)) == 5
    row = store.rows(0.0)[0]
    assert row["category"] == "short" and row["response_logprobs"] == row["response_logprobs_t1"]
    assert len(row["response_ids"]) == len(row["response_logprobs"]) <= 12
    again = rollouts.load_rollouts(built, "train")
    assert again.key == store.key and again.rows() == store.rows()


def test_a_killed_run_goes_on_where_it_stopped(recipe, tmp_path, monkeypatch):
    undisturbed = rollouts.ensure_rollouts(recipe(output=str(tmp_path / "other")), "train", progress=False)
    write, calls = Engine.write, []

    def dies_at_the_second(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(self, *args)

    monkeypatch.setattr(Engine, "write", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        rollouts.ensure_rollouts(recipe(), "train", progress=False)
    with pytest.raises(InputError, match="not finished"):
        rollouts.load_rollouts(recipe(), "train")
    half = tmp_path / "runs" / "rollouts" / undisturbed.key / "shard-00001.tmp"
    half.mkdir()
    (half / "data.arrow").write_bytes(b"half")
    calls.extend([1] * 5)
    resumed = rollouts.ensure_rollouts(recipe(), "train", progress=False)
    assert len(calls) == 7 + 4, "four of the five batches were left"
    assert resumed.key == undisturbed.key and resumed.rows() == undisturbed.rows() and not half.exists()
    rollouts.ensure_rollouts(recipe(), "train", progress=False)
    assert len(calls) == 11, "a finished store is only read"


def test_a_changed_ingredient_is_another_store(recipe, write_jsonl):
    key = rollouts._Plan(recipe(), "train").key
    other = {"source": write_jsonl([{"prompt": "other words"}], "other.jsonl")}
    changes = [
        {"rollouts": {**recipe().rollouts.model_dump(), "seed": 1}},
        {"rollouts": {**recipe().rollouts.model_dump(), "max_new_tokens": 13}},
        {"rollouts": {**recipe().rollouts.model_dump(), "train_temperatures": [0.0]}},
        {"rollouts": {**recipe().rollouts.model_dump(), "dtype": "bfloat16"}},
        {"prompts": {**recipe().prompts.model_dump(), "train": other}},
    ]
    keys = [rollouts._Plan(recipe(**change), "train").key for change in changes]
    assert len({key, *keys}) == 1 + len(changes)
    assert rollouts._Plan(recipe(name="renamed"), "train").key == key, "the name is not an ingredient"
    assert rollouts._Plan(recipe(seed=1), "train").key == key, "seeds of training share the rollouts"
    assert rollouts._Plan(recipe(), "eval").key != key


@pytest.mark.parametrize("limit", [models.HASH_LIMIT, 0], ids=["hashed", "sampled"])
def test_changed_weights_or_template_are_another_store(recipe, tiny_llama_dir, tmp_path, monkeypatch, limit):
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(models, "HASH_LIMIT", limit)
    models.weights_identity.cache_clear()
    copy = shutil.copytree(tiny_llama_dir, tmp_path / "copy")
    key = rollouts._Plan(recipe(target={"model": str(copy)}), "eval").key
    os.utime(copy / "model.safetensors", (0, 0))
    assert rollouts._Plan(recipe(), "eval").key == key, "the same weights in another folder, copied at another time"
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with_template = rollouts._Plan(recipe(target={"model": str(copy)}), "eval").key
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    models.weights_identity.cache_clear()
    with_weights = rollouts._Plan(recipe(target={"model": str(copy)}), "eval").key
    assert len({key, with_template, with_weights}) == 3
    models.weights_identity.cache_clear()


def test_damage_is_refused_by_name_and_can_be_mended(recipe):
    store = rollouts.ensure_rollouts(recipe(), "train", progress=False)
    shard = store.path / "shard-00002"
    arrow = next(shard.glob("*.arrow"))
    data = bytearray(arrow.read_bytes())
    data[len(data) // 2] ^= 1
    arrow.unlink()
    arrow.write_bytes(bytes(data))
    with pytest.raises(InputError, match="shard-00002.*hash.*delete"):
        rollouts.load_rollouts(recipe(), "train")
    (shard / "shard.json").write_text("{")
    with pytest.raises(InputError, match="shard-00002.*damaged"):
        rollouts.load_rollouts(recipe(), "train")
    rows = store.rows()
    shutil.rmtree(shard)
    assert rollouts.ensure_rollouts(recipe(), "train", progress=False).rows() == rows

    manifest = store.path / "manifest.json"
    foreign = json.loads(manifest.read_text())
    foreign["ingredients"]["split"] = "eval"
    manifest.write_text(json.dumps(foreign))
    with pytest.raises(InputError, match=r"manifest\.json: belongs to another store"):
        rollouts.load_rollouts(recipe(), "train")
    manifest.write_text("not json")
    with pytest.raises(InputError, match=r"manifest\.json: not a manifest"):
        rollouts.ensure_rollouts(recipe(), "train", progress=False)


def test_later_turns_hold_the_answers_of_earlier_ones(recipe, write_jsonl, tiny_llama_dir):
    rows = [{"turns": ["one", "two", "three"], "category": "c"}, {"prompt": "x"}]
    turns = {"source": write_jsonl(rows, "turns.jsonl")}
    prompts = {**recipe().prompts.model_dump(), "eval": turns}
    store = rollouts.ensure_rollouts(recipe(prompts=prompts), "eval", progress=False)
    greedy = {row["row_id"]: row for row in store.rows(0.0)}
    assert len(store.rows()) == 8 and sorted(store.dataset.unique("temperature")) == [0.0, 1.0]
    tokenizer = models.load_tokenizer(str(tiny_llama_dir))
    first, second = (row_id for row_id in sorted(greedy) if "turns.jsonl:1" in row_id and "turn3" not in row_id)
    answer = tokenizer.decode(greedy[first]["response_ids"], skip_special_tokens=True).strip()
    text = tokenizer.decode(greedy[second]["prompt_ids"])
    assert second == f"{first}@turn2" and f"assistant\n{answer}<|im_end|>\n<|im_start|>user\ntwo" in text


def test_limits_are_checked_before_weights_are_loaded(recipe, monkeypatch):
    monkeypatch.setattr(models, "load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    prompts = {**recipe().prompts.model_dump(), "max_prompt_tokens": 501}
    with pytest.raises(InputError, match=r"max_prompt_tokens \+ rollouts.max_new_tokens = 513.*limit is 512"):
        rollouts.ensure_rollouts(recipe(prompts=prompts), "train", progress=False)


def test_short_responses_stay_in_the_store_and_are_counted(recipe, monkeypatch, tiny_llama_dir):
    write = Engine.write

    def one_token_for_the_first(self, *args):
        responses = write(self, *args)
        responses[0].ids, responses[0].logprobs, responses[0].logprobs_t1 = [2], [-1.0], [-1.0]
        return responses

    monkeypatch.setattr(Engine, "write", one_token_for_the_first)
    store = rollouts.ensure_rollouts(recipe(), "train", progress=False)
    assert store.counts == {"used": 5, "skipped": {"response shorter than 2 tokens": 5}}
    assert len(store.dataset) == 10 and len(store.rows()) == 5


def test_the_command(recipe, tmp_path, monkeypatch, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe().as_yaml())

    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        return call("data/rollouts.py", file, *words), *capsys.readouterr()

    status, out, err = run("--show", "1")
    assert status == 0 and "the target's response" in out and "tokens/s" in out and err == ""
    status, out, _ = run("--plan", "target.model=/absent", "prompts.train.limit=3")
    assert status == 0 and "up to 6 responses, 72 tokens" in out
    status, _, err = run("prompts.train.source=absent.jsonl")
    assert status == 2 and err == "error: absent.jsonl: no such file\n"
