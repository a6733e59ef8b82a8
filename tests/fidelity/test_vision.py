"""Vision-language models: the full cache writes what the stock model does; policies reach the language model only."""

import json

import pytest
import torch
from helpers import call
from tiny_vision import (
    EOS,
    FAMILIES,
    IMAGE_TOKEN,
    PATCH,
    image_processor,
    inputs_of,
    picture,
    tiny_vision,
    tokenizer,
)

from draftkv.cache.offloaded import cache_for
from draftkv.cache.oracle import oracle_notes
from draftkv.cache.parallel import single
from draftkv.cache.policy import Policy
from draftkv.errors import InputError
from draftkv.fidelity.generate import generate
from draftkv.fidelity.vision import ImagePrompt, attach, check_vision, load_vision

pytest.importorskip("skimage", reason="NOT TESTED: scikit-image, which ships the pictures, is not installed")

FULL = Policy(policy="full")
SMALL = {name: Policy(policy=name, budget=16, window=8) for name in ("bacon", "rcr", "exact", "infinigen")}
NEW = 24


@pytest.fixture(scope="module", params=FAMILIES)
def bound(request) -> tuple[ImagePrompt, list[int]]:
    """A model with an image and a question, and what the stock `generate` writes before the attention is changed."""
    model = tiny_vision(request.param)
    inputs = inputs_of(request.param, model, "chelsea", "describe the picture in detail")
    kinds = {"mm_token_type_ids": (inputs["input_ids"] == IMAGE_TOKEN).int()} if "qwen" in request.param else {}
    stock = model.generate(**inputs, **kinds, max_new_tokens=NEW, do_sample=False)
    prompt = ImagePrompt(attach(model), inputs)
    assert prompt.prompt_ids.count(IMAGE_TOKEN) > 20
    return prompt, stock[0, inputs["input_ids"].shape[1] :].tolist()


def ids(prompt: ImagePrompt, *policies: Policy, **options) -> list[list[int]]:
    return [made.ids for made in generate(prompt, prompt.prompt_ids, policies, NEW, {EOS}, **options)]


def test_full_is_the_stock_generation(bound):
    prompt, stock = bound
    check_vision(prompt.config, "tiny")
    assert len(set(stock)) > 5, "a model that repeats itself proves nothing"
    assert ids(prompt, FULL) == [stock]


def test_only_the_language_model_is_on_the_policy_attention(bound):
    config = bound[0].config
    assert config.text_config._attn_implementation == "draftkv"
    assert config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["rcr", "exact", "bacon"])
def test_a_budget_for_everything_is_full(bound, name):
    prompt, stock = bound
    assert ids(prompt, Policy(policy=name, budget=2000)) == [stock]


def test_small_budgets_change_the_output_and_side_by_side_is_alone(bound):
    prompt, stock = bound
    alone = [ids(prompt, policy)[0] for policy in SMALL.values()]
    assert all(found != stock for found in alone)
    assert ids(prompt, *SMALL.values(), FULL) == [*alone, stock]


@pytest.mark.parametrize("name", SMALL)
def test_kept_entries_are_selected_window_and_generated(bound, name):
    prompt, _ = bound
    cache, policy = cache_for(prompt.config, SMALL[name]), SMALL[name]
    token = cache.forward(prompt, torch.tensor([prompt.prompt_ids]), 1).argmax(-1)
    cache.commit()
    for made in range(6):
        assert set(cache.entries()) == {policy.budget + made}
        for layer in cache.attention_layers:
            assert layer.selection.split.selected == 8
            assert layer.selection.split.tail_start == len(prompt.prompt_ids) - 8
        token = cache.forward(prompt, token[None], 1).argmax(-1)
        cache.commit()


@pytest.mark.parametrize("name", ["bacon", "swa", "oracle"])
@torch.no_grad()
def test_decoding_is_the_parallel_executor(bound, name):
    """One teacher-forced pass with the image agrees with decoding token by token, positions of the image included."""
    prompt, stock = bound
    parts = {} if name == "swa" else {"window": 8}
    policy, first = Policy(policy=name, budget=16, **parts), len(prompt.prompt_ids)
    notes = oracle_notes(prompt, prompt.prompt_ids, stock)
    made = ids(prompt, policy, notes=notes)[0]
    row = torch.tensor([[*prompt.prompt_ids, *made[:-1]]])
    hidden = prompt.get_decoder()(
        row, position_ids=torch.arange(row.shape[1])[None], use_cache=False,
        cache_view=single(first, row.shape[1], policy, notes),
    ).last_hidden_state[0, first - 1 :]  # fmt: skip
    assert prompt.get_output_embeddings()(hidden).argmax(-1).tolist() == made


def test_another_architecture_is_refused():
    from transformers import LlavaConfig, LlavaNextConfig, MistralConfig

    with pytest.raises(InputError, match="not tried on 'llava' with 'llama'.*qwen2_vl"):
        check_vision(LlavaConfig(), "x")
    sliding = LlavaNextConfig(text_config=MistralConfig(sliding_window=8))
    with pytest.raises(InputError, match="no full-attention layer"):
        check_vision(sliding, "x")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved LLaVA-NeXT with its processor, two pictures, a captions file and a recipe."""
    from transformers import LlavaNextProcessor

    root = tmp_path_factory.mktemp("vision")
    tiny_vision("llava_mistral").save_pretrained(root / "model")
    LlavaNextProcessor(
        image_processor("llava"), tokenizer(), patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(root / "model")  # fmt: skip
    rows = []
    for name in ("astronaut", "coffee"):
        picture(name).save(root / f"{name}.png")
        rows.append({"image": f"{name}.png", "prompt": "Describe this image in detail.", "row_id": name})
    (root / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "recipe.yaml").write_text(json.dumps({
        "name": "run", "output": str(root / "runs"), "target": {"model": str(root / "model"), "dtype": "float32"},
        "prompts": {"train": {"source": "x.jsonl"}, "eval": {"source": str(root / "captions.jsonl")},
                    "max_prompt_tokens": 400},
        "views": ["full"],
        "eval": {"policies": ["full", {"policy": "bacon", "budget": 16, "window": 8},
                              {"policy": "rcr", "budget": 16, "window": 8},
                              {"policy": "exact", "budget": 16, "window": 8}]},
    }))  # fmt: skip
    return root


def test_command_on_images(folder, capsys):
    assert call("eval/fidelity.py", folder / "recipe.yaml", "--max-new-tokens", 12, "--together", 3) == 0
    records = [json.loads(line) for line in (folder / "runs/run/fidelity.jsonl").read_text().splitlines()]
    assert [r["row_id"] for r in records] == ["astronaut"] * 4 + ["coffee"] * 4
    assert {r["rouge_l"] for r in records[::4]} == {1.0} and records[0]["sample"] != records[4]["sample"]
    assert "bacon" in (folder / "runs/run/report/fidelity.md").read_text()


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "what?"}, "captions.jsonl:1.*a row needs `image`"),
    ({"image": "astronaut.png"}, "captions.jsonl:1.*and `prompt`"),
    ({"image": "gone.png", "prompt": "what?"}, "gone.png: no such file"),
    ({"image": "captions.jsonl", "prompt": "what?"}, "captions.jsonl: cannot be read"),
])  # fmt: skip
def test_bad_images_are_one_line(folder, tmp_path, capsys, row, said):
    import re

    (tmp_path / "captions.jsonl").write_text(json.dumps(row))
    status = call("eval/fidelity.py", folder / "recipe.yaml", f"prompts.eval.source={tmp_path / 'captions.jsonl'}",
                  f"output={tmp_path}")  # fmt: skip
    found = capsys.readouterr().err
    assert status == 2 and found.count("\n") == 1 and re.search(said, found)


def test_a_processor_without_its_package(monkeypatch, tmp_path):
    tiny_vision("qwen2_vl").config.save_pretrained(tmp_path)
    monkeypatch.setattr("draftkv.fidelity.vision.find_spec", lambda name: None)
    with pytest.raises(InputError, match="torchvision"):
        load_vision(str(tmp_path), None, "float32")


def test_prompts_that_are_too_long(folder, tmp_path, capsys):
    assert call("eval/fidelity.py", folder / "recipe.yaml", "prompts.max_prompt_tokens=20", f"output={tmp_path}") == 2
    assert "every prompt is longer" in capsys.readouterr().err
