"""The drafter, ready for the executors: loaded or cut from the target, checked, on the cache-policy attention."""

import re

from transformers import PreTrainedModel

from draftkv.cache.architecture import check_drafter, check_native_window
from draftkv.cache.attention import ATTENTION
from draftkv.errors import InputError
from draftkv.models import check_same_tokens, load_config, load_model, load_tokenizer, make_drafter
from draftkv.recipe import Model, Recipe


def load_drafter(
    name: str | None, revision: str | None, target: Model, layers: list[int] | None = None
) -> tuple[PreTrainedModel, int]:
    """A drafter in fp32, eval mode, and the number of ids that it shares with the target.

    Args:
        name: folder or hub id; None cuts it from the target (`layers`, or all of them).

    Raises:
        InputError: an architecture that no policy was proven on, or tokenizers that disagree on a token.
    """
    check_drafter(load_config(name or target.model, revision if name else target.revision), name or target.model)
    target_tokenizer = load_tokenizer(target.model, target.revision)
    own = load_tokenizer(name, revision) if name else target_tokenizer
    vocab = check_same_tokens(target_tokenizer, own)
    model = load_model(name, revision) if name else make_drafter(target.model, target.revision, layers)
    model.set_attn_implementation(ATTENTION)
    return model.eval(), vocab


def preflight(recipe: Recipe) -> None:
    """Refuse what cannot work before any weight is loaded: configurations and tokenizers only.

    Raises:
        InputError: see `load_drafter`; or a native window that the architecture or the policy cannot have.
    """
    spec, target = recipe.drafter, recipe.target
    name, revision = (spec.model, spec.revision) if spec.model else (target.model, target.revision)
    config = load_config(name, revision)
    check_drafter(config, name)
    if recipe.export.native_window:
        check_native_window(config.model_type, recipe.eval.policies[recipe.eval.select])
    check_same_tokens(load_tokenizer(target.model, target.revision), load_tokenizer(name, revision))


def drafter_to_train(recipe: Recipe) -> tuple[PreTrainedModel, int]:
    """The recipe's drafter in training mode, with only `train.trainable` parameters taking gradients.

    Raises:
        InputError: see `load_drafter`; or `train.trainable` matches nothing.
    """
    spec, train = recipe.drafter, recipe.train
    model, vocab = load_drafter(spec.model, spec.revision, recipe.target, spec.layers)
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if train.trainable is not None:
        wanted = [re.compile(pattern) for pattern in train.trainable]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(w.search(name) for w in wanted))
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError(f"train.trainable {train.trainable}: matches no parameter of the drafter")
    return model.train(), vocab
