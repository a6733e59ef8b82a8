"""How the target is started in vLLM, served or offline; `python -m draftkv.teacher.engines.serve RECIPE ...` prints the
server's command, one word a line, for launch/serve_target.sh.
"""

import json
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from draftkv import models
from draftkv.errors import InputError
from draftkv.recipe import Model, Recipe, load_recipe
from draftkv.teacher.engine import served_stop_ids

ROOT = Path(__file__).resolve().parents[3]


class ServedTokens:
    """What a client of vLLM knows of the target's tokens without its weights. Needs `self.recipe`."""

    recipe: Recipe

    @cached_property
    def _tokenizer(self) -> Any:
        return models.load_tokenizer(self.recipe.target.model, self.recipe.target.revision)

    @cached_property
    def _stops(self) -> set[int]:
        return served_stop_ids(self.recipe.target.model, self.recipe.target.revision, self._tokenizer)


def engine_python(recipe: Recipe) -> str:
    """The Python of the engine's environment.

    Raises:
        InputError: there is none.
    """
    given = recipe.engine.python or os.environ.get("DRAFTKV_ENGINE_PYTHON")
    found = Path(given or ROOT / ".venv-engine" / "bin" / "python").expanduser()
    if not found.is_file():
        raise InputError(f"{found}: no such Python; make the engine's environment with launch/engine_env.sh, or name"
                         " one (engine.python, or DRAFTKV_ENGINE_PYTHON)")  # fmt: skip
    return str(found)


def engine_environment() -> dict[str, str]:
    """Variables for a process of the engine's environment: nothing that would lead its imports into ours or make it a
    rank of this launch, no usage statistics sent out, and on a CPU a cache of 2 GiB unless another size is given."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "RANK", "WORLD_SIZE", "LOCAL_RANK",
            "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
    own = {name: value for name, value in os.environ.items()
           if name not in ours and not name.startswith(("TORCHELASTIC_", "ACCELERATE_"))}
    return {"VLLM_NO_USAGE_STATS": "1", **({} if torch.cuda.is_available() else {"VLLM_CPU_KVCACHE_SPACE": "2"}), **own}


def needed_length(recipe: Recipe) -> int:
    """Tokens of the longest sequence: scoring feeds prompt and response, and generates one token more."""
    return recipe.prompts.max_prompt_tokens + recipe.rollouts.max_new_tokens + 1


def weights_name(target: Model) -> str:
    """A name made of the weights: equal for copies of the same files, wherever they lie."""
    from draftkv.teacher.rollouts import content_hash

    return f"weights:{content_hash(models.weights_identity(target.model, target.revision))[:16]}"


def vllm_options(recipe: Recipe, dtype: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, and by other names of the server; `engine.options` come last.

    Raises:
        InputError: rows with no room for the token that scoring generates.
    """
    target, length = recipe.target, needed_length(recipe)
    limit = models.model_limit(models.load_config(target.model, target.revision))
    if length > limit:
        raise InputError(f"{target.model}: prompts.max_prompt_tokens + rollouts.max_new_tokens + 1 = {length}, but this"
                         f" model's limit is {limit}; vLLM generates one token when it scores a row")  # fmt: skip
    source = models.resolve(target.model)
    return {
        "model": source, **({} if Path(source).is_dir() or target.revision is None else {"revision": target.revision}),
        "dtype": dtype, "max_model_len": length, "max_logprobs": recipe.signal.k, "generation_config": "vllm",
        **({} if torch.cuda.is_available() else {"enforce_eager": True}), **recipe.engine.options,
    }  # fmt: skip


def server_command(recipe: Recipe) -> list[str]:
    """The command that serves the recipe's target at `engine.url`.

    Raises:
        InputError: an address without a port; see also `engine_python` and `vllm_options`.
    """
    address = urlsplit(recipe.engine.url)
    if address.port is None:
        raise InputError(f"engine.url {recipe.engine.url}: no port to listen on; give one, as in"
                         f" {address.scheme}://{address.hostname}:8000")  # fmt: skip
    # Not `vllm serve`: that command fails in the CPU wheel, which has another name than it looks for.
    words = [
        engine_python(recipe), "-m", "vllm.entrypoints.openai.api_server",
        "--host", str(address.hostname), "--port", str(address.port),
        "--served-model-name", recipe.engine.model or recipe.target.model, weights_name(recipe.target),
    ]  # fmt: skip
    for name, value in vllm_options(recipe, recipe.target.dtype).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words


if __name__ == "__main__":
    try:
        print("\n".join(server_command(load_recipe(sys.argv[1], sys.argv[2:]))))
    except InputError as error:
        sys.exit(f"error: {error}")
