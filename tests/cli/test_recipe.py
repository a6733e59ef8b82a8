"""What a mistake in a recipe gets: one line that names the key's path. `test_bad_input.py` runs the commands."""

import importlib
import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from draftkv.errors import InputError
from draftkv.recipe import Recipe, load_recipe
from draftkv.settings import validate

ROOT = Path(__file__).parents[2]
QUICK = Path(__file__).parent / "example.yaml"

BAD = [
    # unknown or misspelt key: the nearest valid one, or all of them
    (["train.stepz=3"], "train.stepz: unknown key; did you mean 'steps'?"),
    (["trian.steps=3"], "trian: unknown key; did you mean 'train'?"),
    (["eval.policies.1.budgett=3"], "eval.policies.1.budgett: unknown key; did you mean 'budget'?"),
    (["views.1.sink=3"], "views.1.sink: unknown key; did you mean 'sinks'?"),
    (["views.2.scorer={kind: snapkv, poool: 3}"], "views.2.scorer.poool: unknown key; did you mean 'pool'?"),
    (["prompts.train.xyzzy=3"], "prompts.train.xyzzy: unknown key; known keys: categories, config, limit, source"),
    (["loss.0.bet=0.1"], "loss.0.bet: unknown key; did you mean 'beta'?"),
    (["eval.policies.4.scorer={kind: snapkv, poool: 3}"], "poool: unknown key; did you mean 'pool'?"),
    # wrong type
    (["train.steps=many"], "train.steps: .*valid integer.*(given: 'many')"),
    (["train.lr=fast"], "train.lr: .*valid number"),
    (["train.lr=.inf"], "train.lr: .*finite number"),
    (["train.steps=yes"], "train.steps: expected a number (given: True)"),
    (["views.1.budget=true"], "views.1.budget: expected a number (given: True)"),
    (["views.1.budget=lots"], "views.1.budget: Input should be a valid list or .*integer.* (given: 'lots')"),
    (["eval.policies.1.budget=[1]"], "eval.policies.1.budget: Input should be a valid integer or "),
    (["train.trainable=['a(']"], "train.trainable: 'a.' is not a regular expression"),
    (["train=3"], "train: expected a section of keys (given: 3)"),
    (["eval.policies.1.budget=abc"], "eval.policies.1.budget: Input should be a valid integer or a valid number"),
    (["eval.policies.9.budget=100"], "eval.policies has 5 entries, 0 to 4; to add one, give all of them"),
    (["eval.policies=full"], "eval.policies: .*valid list"),
    (["target.dtype=int8"], "target.dtype: .*'float32' or 'bfloat16'.*(given: 'int8')"),
    (["loss.0.name=kl"], "loss.0.name: .*'forward_kl'"),
    (["trackers=[mlflow]"], "trackers.0: .*'wandb'"),
    # policies
    (["views.2.rho=1.5"], "views.2.*rho: .*less than or equal to 1"),
    (["views.2.rho=-0.1"], "views.2.*rho: .*greater than or equal to 0"),
    (["views.2.rho=[0.5, 1.5]"], "views.2.*rho: .*less than or equal to 1"),
    (["views.2.rho=[0.7, 0.3]"], "views.2: rho .0.7, 0.3.: a range is .low, high."),
    (["eval.policies.4.rho=2"], "eval.policies.4.rho: .*less than or equal to 1"),
    (["eval.policies.4.budget=4"], "eval.policies.4: budget 4 is smaller than sinks . 1 = 5"),
    (["eval.policies.1.budget=0"], "eval.policies.1: budget 0 is smaller than sinks . 1 = 1"),
    (["eval.policies.1.budget=1.5"], "eval.policies.1: budget 1.5: a fraction of the prompt is between 0 and 1"),
    (["views.2.budget=[2, 180]"], "views.2.* budget 2 is smaller than sinks . 1 = 5"),
    (["eval.policies.1.budget=null"], "eval.policies.1: policy 'swa' needs a budget"),
    (["eval.policies.1.policy=swaa"], "eval.policies.1: unknown policy 'swaa'; known: full, swa,"),
    (["eval.policies=[{policy: swa, budget: 9}]"], "eval: policies: the first one must be `full`"),
    (["eval.policies=[full, full]"], "eval: policies: the same policy is listed twice"),
    (["eval.select=9"], "eval: select 9: there are 5 policies"),
    (["views=[{policy: swa, budget: 9}]"], "views: `full` must be one of them"),
    (["views=[]"], "views: .*at least 1 item"),
    # numbers out of range
    (["eval.draft_length=0"], "eval.draft_length: .*greater than or equal to 1.*(given: 0)"),
    (["train.lr=0"], "train.lr: .*greater than 0"),
    (["rollouts.train_temperatures=[-1]"], "rollouts.train_temperatures: needs at least one temperature, none below 0"),
    (["rollouts.eval_temperatures=[]"], "rollouts.eval_temperatures: needs at least one temperature"),
    (["views.0.weight=0"], "views.0.*weight: .*greater than 0"),
    (["name=a/b"], "name: .*pattern"),
    # an attention backend that there is not
    (["drafter.attention=flash_attention_2"],
     "drafter.attention: Input should be 'auto', 'sdpa', 'flash' or 'flex' (given: 'flash_attention_2')"),
    # what an architecture cannot honour, as far as its configuration is known
    (["drafter.model=Qwen/Qwen3-0.6B", "export.native_window=true", "eval.select=1"],
     "native window: engines ignore the drafter's on 'qwen3'"),
    (["export.native_window=true", "eval.select=2"], "native window: 'streaming B=136' is not a plain window"),
    # overrides that cannot be read
    (["steps"], "override 'steps': expected key.sub=value"),
    (["=3"], "override '=3': expected key.sub=value"),
    (["views.7.rho=0.5"], "override 'views.7.rho=0.5': "),
    (["views.one.rho=0.5"], "override 'views.one.rho=0.5': "),
    (["train.steps=[1"], "override 'train.steps=.1': "),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_a_mistake_is_one_line_that_names_the_key(overrides, message):
    with pytest.raises(InputError) as caught:
        load_recipe(QUICK, overrides)
    text = str(caught.value)
    assert re.search(message.replace("(", r"\(").replace(")", r"\)"), text), text
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize("key", ["target", "prompts", "views", "eval", "name"])
def test_a_missing_key_is_named(key, tmp_path):
    plain = yaml.safe_load(QUICK.read_text())
    del plain[key]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(InputError, match=f"r.yaml: {key}: this key is required"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(("content", "message"), [
    (None, "no such recipe file; see recipes/ for examples"),
    ("a: [1", "not a valid recipe: "),
    ("- full\n", "a recipe is a mapping of keys"),
    ("just words\n", "this key is required"),
    ("", "this key is required"),
    ("name: x\nname: y\n", "duplicate key"),
])
def test_a_file_that_is_no_recipe(content, message, tmp_path):
    path = tmp_path / "r.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(path)
    assert "r.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_say_why_and_survive_a_round_trip(path, tmp_path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem and len(recipe.why) > 60
    (tmp_path / "r.yaml").write_text(recipe.as_yaml())
    assert load_recipe(tmp_path / "r.yaml") == recipe == validate(recipe.model_dump(), Recipe, "recipe")


def test_an_architecture_is_refused_when_its_configuration_is_here(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(InputError, match="r.yaml: .*not proven on 'opt'; supported: Llama, Qwen3, Qwen3.5") as caught:
        load_recipe(copy_of_quick(tmp_path), [f"drafter.model={tmp_path}"])
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="config.json: not JSON"):
        load_recipe(QUICK, [f"drafter.model={tmp_path}"])


def copy_of_quick(folder: Path) -> Path:
    (folder / "r.yaml").write_text(QUICK.read_text())
    return folder / "r.yaml"


@pytest.mark.parametrize(("installed", "capability", "overrides", "means"), [
    # flash-attn's version, the GPU's compute capability, overrides, the backend or why there is none
    (None, None, [], "sdpa"),
    (None, (9, 0), ["train.precision=bf16"], "sdpa"),
    ("2.8.3", None, ["train.precision=bf16"], "sdpa"),
    ("2.8.3", (7, 5), ["train.precision=bf16"], "sdpa"),
    ("2.8.3", (9, 0), ["train.precision=bf16"], "flash"),
    ("2.8.3", (9, 0), ["train.precision='no'", "eval.precision=bf16"], "flash"),
    ("2.8.3", (9, 0), ["train.precision='no'", "eval.precision='no'"], "sdpa"),
    ("2.8.3", (9, 0), ["train.precision=bf16", "drafter.attention=sdpa"], "sdpa"),
    ("2.8.3", (9, 0), ["train.precision=bf16", "drafter.attention=flex"], "flex"),
    (None, (9, 0), ["drafter.attention=flash"], "'flash' is not installed (package flash-attn); 'auto' takes what"),
    ("2.7.4.post1", (9, 0), ["train.precision=bf16"], "sdpa"),
    ("2.7.4.post1", (9, 0), ["drafter.attention=flash"], "'flash' needs flash-attn 2.8 or newer, here is 2.7.4.post1"),
    ("2.8.3", None, ["drafter.attention=flash"], "'flash' needs a CUDA device; 'auto' takes what"),
    ("2.8.3", (7, 5), ["drafter.attention=flash"], "'flash' needs a CUDA device of compute capability 8.0"),
    ("2.8.3", (9, 0), ["drafter.attention=flash", "train.precision='no'", "eval.precision='no'"],
     "'flash' needs half precision; set train.precision or eval.precision to bf16"),
    (None, None, ["drafter.attention=flex"], "'flex' needs a CUDA device; 'auto' takes what"),
])
def test_the_attention_backend_is_what_is_installed(installed, capability, overrides, means, monkeypatch):
    with_flash_attn(monkeypatch, installed)
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    if means in ("sdpa", "flash", "flex"):
        assert load_recipe(QUICK, overrides).backend() == means
        return
    with pytest.raises(InputError, match="example.yaml: drafter.attention: " + re.escape(means)) as caught:
        load_recipe(QUICK, overrides)
    assert "\n" not in str(caught.value)


def with_flash_attn(monkeypatch, version, error=None):
    """As if flash-attn were installed in this version (None: not at all), and its kernels could be loaded or not."""
    own_version, own_import = metadata.version, importlib.import_module

    def version_of(name):
        if name == "flash-attn" and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == "flash-attn" else own_version(name)

    def import_module(name, package=None):
        if not name.startswith("flash_attn"):
            return own_import(name, package)
        if error is not None:
            raise error

    monkeypatch.setattr("importlib.metadata.version", version_of)
    monkeypatch.setattr("importlib.import_module", import_module)


def test_kernels_that_cannot_be_loaded_are_not_taken(monkeypatch):
    with_flash_attn(monkeypatch, "2.8.3", ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert load_recipe(QUICK, ["train.precision=bf16"]).backend() == "sdpa"
    with pytest.raises(InputError, match="'flash' cannot be loaded: flash_attn_2_cuda.so: undefined symbol.*'auto'"):
        load_recipe(QUICK, ["drafter.attention=flash"])


def test_a_plan_does_not_need_the_backend(monkeypatch):
    """Plans are made where there is no GPU, before one is rented."""
    assert load_recipe(QUICK, ["drafter.attention=flash", "train.precision=bf16"], runs_here=False)


def test_every_corner_of_a_views_ranges_is_checked():
    """Both lows and both highs leave room for a block; the low budget with the high rho does not."""
    view = "{policy: rift_stat_block, budget: [80, 144], rho: [0.25, 0.75], sinks: 4}"
    with pytest.raises(InputError, match="views.1: .*leave no room"):
        load_recipe(QUICK, [f"views=[full, {view}]"])


def test_an_override_takes_the_place_of_what_was_there():
    """Merged, the new policy would keep the sinks of the old one."""
    recipe = load_recipe(QUICK, ["eval.policies.3={policy: swa, budget: 9}", "views.2={policy: swa, budget: 8}"])
    assert recipe.eval.policies[3].label == "swa B=9" and recipe.eval.policies[3].sinks == 0
    assert recipe.views[2].policy({}).label == "swa B=8" and recipe.views[2].weight == 1.0
    with pytest.raises(InputError, match="eval.policies: this key is required"):
        load_recipe(QUICK, ["eval={every: 5}"])


def test_numbers_that_yaml_reads_as_text_are_numbers():
    """PyYAML reads 1e-4 as a string."""
    assert load_recipe(QUICK, ["train.lr=1e-4"]).train.lr == 1e-4
