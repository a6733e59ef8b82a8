"""Several processes, one drafter: what a launch may look like, and how each backend of accelerate takes a step.

Replicated backends (one process, DDP, ZeRO-1 and -2) hold all weights in every process, sharded ones (FSDP2, ZeRO-3) a
part. Weights are fp32 in all of them and the forward pass runs under the student's own autocast: a backend's mixed
precision would round the master weights, or what is saved of them.
"""

import math
import os
import platform
import warnings
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn
from transformers.integrations import unset_hf_deepspeed_config

from draftkv.errors import InputError
from draftkv.models import decoder_layers
from draftkv.recipe import Recipe

REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")


def start_accelerator(recipe: Recipe) -> Accelerator:
    """The accelerator of this launch, checked against the recipe.

    Raises:
        InputError: a backend that was not proven, or settings of a backend that would override the recipe's.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns, wherever it is installed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls of torch
    world = int(os.environ.get("WORLD_SIZE", "1"))
    deepspeed, fsdp = (os.environ.get(f"ACCELERATE_USE_{n}", "").lower() == "true" for n in ("DEEPSPEED", "FSDP"))
    alone = world == 1 and not deepspeed and not fsdp
    # Without a GPU accelerate has to be told how processes speak, or each believes itself alone: DeepSpeed by the
    # backend's name, the others by `cpu`.
    on_cpu = not alone and not torch.cuda.is_available()
    # Other processes wait while the first one writes rollouts, which may take hours.
    group = {"timeout": timedelta(days=1), **({"backend": "gloo"} if on_cpu and deepspeed else {})}
    try:
        accelerator = Accelerator(
            mixed_precision="no", project_dir=str(recipe.run_dir), cpu=on_cpu and not deepspeed,
            kwargs_handlers=[] if alone else [InitProcessGroupKwargs(**group)],
            deepspeed_plugin=_deepspeed_plugin(recipe) if deepspeed else None,
        )  # fmt: skip
    except ImportError as error:
        raise InputError(f"{' '.join(str(error).split())[:200]}; pip install 'draftkv[deepspeed]'") from error
    if deepspeed:
        # Or transformers loads every model in parts under ZeRO-3; the drafter alone is divided, when it is prepared.
        unset_hf_deepspeed_config()
    if on_cpu and fsdp:
        # accelerate reads the plugin and then keeps to DDP without a GPU; what it calls from here on needs none.
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    kind = accelerator.distributed_type.value
    if accelerator.num_processes != world:
        raise InputError(f"{world} processes were started and accelerate sees {accelerator.num_processes} ({kind}): "
                         "launch with one of launch/accelerate/*.yaml")  # fmt: skip
    if kind not in (*REPLICATED, "FSDP", "DEEPSPEED"):
        raise InputError(f"accelerate is configured for {kind}; supported: one process, DDP, FSDP2 and DeepSpeed "
                         "ZeRO-1 to -3, see launch/accelerate/")  # fmt: skip
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise InputError("accelerate is configured for FSDP1; set fsdp_version: 2, see launch/accelerate/fsdp2.yaml")
    if accelerator.gradient_accumulation_steps != 1:
        raise InputError("accelerate's configuration sets gradient_accumulation_steps; set train.rows and "
                         "train.micro_rows in the recipe instead")  # fmt: skip
    return accelerator


def _deepspeed_plugin(recipe: Recipe) -> DeepSpeedPlugin:
    """DeepSpeed's settings with what the recipe decides filled in.

    Raises:
        InputError: the file is missing, or sets one of those itself to something else.
    """
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file not in ("", "none") and not os.path.isfile(file):
        raise InputError(f"DeepSpeed's configuration {file} is not there; a relative path begins where accelerate is "
                         "called")  # fmt: skip
    plugin = DeepSpeedPlugin()
    given, train = plugin.deepspeed_config, recipe.train
    # Rows are counted by the loop, which normalises by supervised tokens: DeepSpeed is told of one row and one pass.
    decided = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": train.clip}
    advice = {"train_micro_batch_size_per_gpu": "train.micro_rows", "gradient_accumulation_steps": "train.rows",
              "gradient_clipping": "train.clip"}  # fmt: skip
    for key, value in decided.items():
        own = given.get(key, "auto")
        if own != "auto" and own != value:
            raise InputError(f"DeepSpeed's configuration sets {key} to {own}, the run needs {value}: leave it 'auto' "
                             f"and set {advice[key]} in the recipe")  # fmt: skip
        given[key] = value
    for key in ("fp16", "bf16", "optimizer", "scheduler"):
        own = given.get(key)
        if own and (key in ("optimizer", "scheduler") or own.get("enabled") not in (False, "auto", None)):
            raise InputError(f"DeepSpeed's configuration sets `{key}`: remove it; precision, optimizer and learning "
                             "rate are the recipe's (`train`), and master weights are fp32")  # fmt: skip
    if recipe.signal.source == "model" and given.get("zero_optimization", {}).get("stage") == 3:
        raise InputError("ZeRO-3 would keep a whole target beside each part of the drafter: store its signal "
                         "(data/signals.py, then signal.source=stored), or use FSDP2, which shards it")  # fmt: skip
    given.pop("train_batch_size", None)
    return plugin


def backend_name(accelerator: Accelerator) -> str:
    """What a checkpoint and the provenance call the backend: `replicated`, `fsdp2`, `zero1` .. `zero3`."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return "fsdp2" if kind == "FSDP" else "replicated"


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether a process holds only a part of the weights."""
    return backend_name(accelerator) in ("fsdp2", "zero3")


def check_shared_folder(recipe: Recipe, accelerator: Accelerator) -> None:
    """Every process must see the main process's run folder: checkpoints and rollouts are read from it.

    Raises:
        InputError: one does not; names the folder.
    """
    if accelerator.num_processes == 1:
        return
    token = recipe.run_dir / ".seen"
    if accelerator.is_main_process:
        token.write_text(os.urandom(8).hex())
    here = str(recipe.run_dir.resolve())
    wanted, folder = broadcast_object_list([token.read_text() if accelerator.is_main_process else "", here])
    found = token.read_text() if token.is_file() else ""
    blind = [name for name, seen in gather_object([(here, found == wanted)]) if not seen]
    if blind:
        raise InputError(f"{folder}: the first process's run folder is not what another one finds at {blind[0]}; "
                         "give `output` as an absolute path on a file system that all machines share")  # fmt: skip


def check_same(accelerator: Accelerator, what: str, key: str) -> None:
    """Every process must find the same ingredients of a store, or each would work on another one.

    Raises:
        InputError, in all of them: one does not; names the machine.
    """
    if accelerator.num_processes == 1:
        return
    (first, _), *others = gather_object([(key, platform.node())])
    for other, machine in others:
        if other != first:
            raise InputError(f"{what}: {machine} finds other ingredients (store {other}) than the first process (store "
                             f"{first}): target, tokenizer, prompts and code must be the same on every machine")


def end_together(accelerator: Accelerator) -> None:
    """Take the group of processes down, in all of them at once: one that ends while its threads still run may die of
    it, and a launch with a dead process has failed."""
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        PartialState().destroy_process_group()


def shard_layers(model: nn.Module, device: torch.device) -> nn.Module:
    """Divide a frozen model's layers among all processes, each gathered while it runs. Embeddings and head stay whole:
    the head is read outside of a forward pass. Every process must then call the model equally often."""
    from torch.distributed.fsdp import fully_shard

    for layer in decoder_layers(model):
        fully_shard(layer.to(device), reshard_after_forward=True)
    return model.to(device)


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter that may be sharded. Every process must ask."""
    if hasattr(parameter, "full_tensor"):  # FSDP2
        return parameter.full_tensor()
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.clone()
    return parameter.data


class Updater:
    """Backward passes and the update, the same for every backend.

    Args:
        student, optimizer: as `accelerator.prepare` returned them.
    """

    def __init__(self, accelerator: Accelerator, student: nn.Module, optimizer: torch.optim.Optimizer):
        self.accelerator, self.student, self.optimizer = accelerator, student, optimizer
        self.deepspeed = accelerator.distributed_type.value == "DEEPSPEED"

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of one pass: gradients are exchanged after the last one."""
        if self.deepspeed:
            self.student.set_gradient_accumulation_boundary(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.student)

    def backward(self, loss: Tensor) -> None:
        """Every backend averages gradients over processes; scale the loss when their sum is wanted."""
        if self.deepspeed:
            # It steps by the norm alone, so a loss that is not finite must show there.
            self.student.backward(loss if torch.isfinite(loss) else loss * float("nan"))
        else:
            self.accelerator.backward(loss)

    def update(self, clip: float, finite: bool) -> tuple[float, bool]:
        """Clip and step, unless the loss (`finite`) or the gradient is not finite.

        Returns:
            The gradient's norm before clipping, and whether the weights were updated.
        """
        if self.deepspeed:
            self.student.step()
            return float(self.student.get_global_grad_norm()), self.student.was_step_applied()
        norm = float(self.accelerator.clip_grad_norm_(self.student.parameters(), clip))
        finite = finite and math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, finite
