"""The drafter, ready for the executors: loaded or cut from the target, checked, on the cache-policy attention."""

import re

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import draftkv.cache.attention  # noqa: F401  (transformers learns the names of ATTENTIONS)
from draftkv.cache.architecture import check_drafter, check_native_window, check_policies
from draftkv.cache.backends.choice import ATTENTIONS, described
from draftkv.cli import say
from draftkv.errors import InputError
from draftkv.models import (
    check_layers,
    check_pair,
    check_same_tokens,
    load_config,
    load_model,
    load_tokenizer,
    make_drafter,
)
from draftkv.recipe import Drafter, Model, Recipe


def load_drafter(
    name: str | None, revision: str | None, target: Model, layers: list[int] | None = None, backend: str = "sdpa"
) -> tuple[PreTrainedModel, int]:
    """A drafter in fp32, eval mode, and the number of ids that it shares with the target.

    Args:
        name: folder or hub id; None cuts it from the target (`layers`, or all of them).
        backend: of its attention, see `draftkv.cache.backends.choice`.

    Raises:
        InputError: an architecture that no policy was proven on, or tokenizers that disagree on a token.
    """
    check_drafter(load_config(name or target.model, revision if name else target.revision), name or target.model)
    target_tokenizer = load_tokenizer(target.model, target.revision)
    own = load_tokenizer(name, revision) if name else target_tokenizer
    vocab = check_same_tokens(target_tokenizer, own)
    model = load_model(name, revision) if name else make_drafter(target.model, target.revision, layers)
    model.set_attn_implementation(ATTENTIONS[backend])
    return model.eval(), vocab


def preflight(recipe: Recipe, drafter: str | None = None) -> None:
    """Refuse what cannot work before any weight is loaded: configurations and tokenizers only.

    Args:
        drafter: folder or hub id of a drafter to evaluate in place of the recipe's.

    Raises:
        InputError: a model that is missing or not supported, tokenizers that disagree, rows longer than a model's
            limit; layers, parameters or a native window that the drafter does not have.
    """
    spec = Drafter(model=drafter) if drafter else recipe.drafter
    check_pair(recipe.target, spec, recipe.prompts.max_prompt_tokens + recipe.rollouts.max_new_tokens)
    origin = spec if spec.model else recipe.target
    config = load_config(origin.model, origin.revision)
    check_drafter(config, origin.model)
    if spec.layers is None:  # of a drafter that is cut from the target, the cut decides
        shown = [view.policy({n: v[0] for n in view.ranges if isinstance(v := getattr(view, n), list)})
                 for view in recipe.views]
        check_policies(config, origin.model, [*recipe.eval.policies, *shown])
    if drafter:
        return
    if not spec.model and spec.layers is not None:
        check_layers(config, spec.layers, origin.model)
    if recipe.export.native_window:
        check_native_window(config.model_type, recipe.eval.policies[recipe.eval.select])
    if recipe.train.trainable is not None:
        _trainable(_skeleton(config), recipe.train.trainable)


def exported(recipe: Recipe) -> str:
    """The folder of the run's export.

    Raises:
        InputError: there is none.
    """
    folder = recipe.run_dir / "export"
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: nothing is exported yet; run train/distill.py with this recipe or give --drafter")
    return str(folder)


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model without numbers: names and shapes of its parameters."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _trainable(model: PreTrainedModel, patterns: list[str]) -> set[str]:
    """Raises: InputError when no parameter matches."""
    wanted = [re.compile(pattern) for pattern in patterns]
    found = {name for name, _ in model.named_parameters() if any(w.search(name) for w in wanted)}
    if not found:
        raise InputError(f"train.trainable {patterns}: matches no parameter of the drafter")
    return found


def drafter_to_evaluate(recipe: Recipe, name: str) -> tuple[PreTrainedModel, int]:
    """A drafter that was trained before, under the recipe's attention backend; see `load_drafter`."""
    say(f"attention: {described(recipe.backend())}")
    return load_drafter(name, None, recipe.target, backend=recipe.backend())


def drafter_to_train(recipe: Recipe) -> tuple[PreTrainedModel, int]:
    """The recipe's drafter in training mode, with only `train.trainable` parameters taking gradients.

    Raises:
        InputError: see `load_drafter`; or `train.trainable` matches nothing.
    """
    spec, train = recipe.drafter, recipe.train
    say(f"attention: {described(recipe.backend())}")
    model, vocab = load_drafter(spec.model, spec.revision, recipe.target, spec.layers, recipe.backend())
    if train.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if train.trainable is not None:
        wanted = _trainable(model, train.trainable)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
    return model.train(), vocab
