"""Every launch configuration that ships: two CPU processes train what one does, resume, and export everything.

In fp32 losses and weights agree with one process to 1e-5; acceptance lengths are equal.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.utils import DistributedType
from helpers import ROOT, call, write_recipe
from safetensors.torch import load_file

from draftkv.distill import checkpoints
from draftkv.distill import processes as processes_module
from draftkv.distill.processes import check_shared_folder, start_accelerator
from draftkv.errors import InputError
from draftkv.recipe import load_recipe

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or not (shutil.which("c++") or shutil.which("g++")),
    reason="NOT TESTED HERE: needs deepspeed, and a C++ compiler for what it builds on a CPU",
)
LAUNCHES = ["cpu", "ddp", "fsdp2", *(pytest.param(f"zero{stage}", marks=needs_deepspeed) for stage in (1, 2, 3))]
SETTINGS = {"rows": 5, "steps": 6, "micro_rows": 2, "checkpoint_every": 3, "clip": 0.5}


def launch(config: str, recipe: Path, *overrides: str, processes: int = 2) -> tuple[int, str, str]:
    """`accelerate launch` with a shipped configuration; its exit status, output and errors."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
               str(ROOT / "launch" / "accelerate" / f"{config}.yaml"), "--num_processes", str(processes),
               "--main_process_port", "0", str(ROOT / "train" / "distill.py"), str(recipe), *overrides]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def acceptance(run: Path) -> list[float]:
    return [json.loads(line)["al"] for line in (run / "acceptance.jsonl").read_text().splitlines()]


def apart(run: Path, other: Path) -> float:
    """The largest difference of two exports, which hold the same tensors."""
    one, two = (load_file(x / "export" / "model.safetensors") for x in (run, other))
    assert one.keys() == two.keys() and all(one[k].shape == two[k].shape and one[k].numel() for k in one)
    return max(float((one[k] - two[k]).abs().max()) for k in one)


def step_back(run: Path) -> None:
    """As if the run had been killed after its checkpoint of step 3 and the steps it logged since."""
    (run / "done.json").unlink()
    shutil.rmtree(run / "export")
    shutil.rmtree(run / "checkpoints" / "step-000006")
    shutil.rmtree(run / "checkpoints" / "last")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Path]:
    """One process: its recipe and its runs, on the target in process and on stored signals. All runs share rollouts."""
    recipe = write_recipe(tmp_path_factory.mktemp("distributed"), **SETTINGS)
    plain = yaml.safe_load(recipe.read_text())
    stored = recipe.with_name("stored.yaml")
    stored.write_text(yaml.safe_dump({**plain, "signal": {"source": "stored", "k": 16}}))
    for path, name in ((recipe, "model"), (stored, "stored")):
        assert call("train/distill.py", path, f"name={name}") == 0
    runs = Path(plain["output"])
    return {"recipe": recipe, "model": runs / "model", "stored": runs / "stored"}


@pytest.mark.parametrize("config", LAUNCHES)
def test_every_launch_equals_one_process_and_resumes(config, alone):
    source = "stored" if config == "zero3" else "model"
    one, recipe = alone[source], alone["recipe"].with_name("stored.yaml") if source == "stored" else alone["recipe"]
    two = one.with_name(config)
    processes = 1 if config == "cpu" else 2
    code, out, err = launch(config, recipe, f"name={config}", processes=processes)
    assert code == 0, err[-3000:]
    backend = "replicated" if config in ("cpu", "ddp") else config
    assert f"{processes} process(es) on cpu, {backend}" in out
    for a, b in zip(metrics(one), metrics(two), strict=True):
        for key in ("loss", "lr", "grad_norm", "alpha", "supervised_tokens"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key
    assert acceptance(one) == pytest.approx(acceptance(two), abs=1e-6)
    assert apart(one, two) < 1e-5
    if config in ("cpu", "zero1"):
        return  # tests/resume; ZeRO-2's checkpoint
    shutil.copytree(two / "export", two / "before" / "export")
    step_back(two)
    # Parts of ZeRO belong to their processes, and give the same bits; the others may come back on another number.
    fewer = config in ("ddp", "fsdp2")
    code, out, err = launch(config, recipe, f"name={config}", processes=1 if fewer else 2)
    assert code == 0 and "continuing after step 3" in out, err[-3000:]
    assert apart(two / "before", two) < 1e-5 if fewer else apart(two / "before", two) == 0


class Launched:
    """What a checkpoint asks of an accelerator before it reads anything."""

    def __init__(self, kind: str, stage: int, processes: int):
        self.distributed_type = DistributedType(kind)
        self.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        self.num_processes = processes


@pytest.mark.parametrize(
    "now, told",
    [(Launched("MULTI_GPU", 0, 4), "written by backend zero2, this launch is replicated"),
     (Launched("DEEPSPEED", 3, 4), "written by backend zero2, this launch is zero3"),
     (Launched("DEEPSPEED", 2, 2), "written in parts by 4 processes of zero2, this launch has 2; launch 4")],
)  # fmt: skip
def test_a_checkpoint_that_these_processes_cannot_put_together_is_refused(tmp_path, now, told):
    step = tmp_path / "checkpoints" / "step-000003"
    step.mkdir(parents=True)
    (step / "state.json").write_text(json.dumps({"step": 3, "launch": {"backend": "zero2", "processes": 4}}))
    with pytest.raises(InputError, match=told):
        checkpoints.load_newest(now, tmp_path)


@needs_deepspeed
@pytest.mark.parametrize(
    "change, told",
    [({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps to 8, the run needs 1.*train.rows"),
     ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu to 4.*train.micro_rows"),
     ({"gradient_clipping": 1.0}, "gradient_clipping to 1.0, the run needs 0.5.*train.clip"),
     ({"bf16": {"enabled": True}}, "sets `bf16`"), ({"fp16": {"enabled": True}}, "sets `fp16`"),
     ({"optimizer": {"type": "Adam"}}, "sets `optimizer`"), ({"scheduler": {"type": "WarmupLR"}}, "sets `scheduler`"),
     ({"zero_optimization": {"stage": 3}}, "signal.source=stored")],
)  # fmt: skip
def test_deepspeed_cannot_override_the_recipe(tmp_path, monkeypatch, change, told):
    settings = json.loads((ROOT / "launch" / "deepspeed" / "zero2.json").read_text())
    (tmp_path / "changed.json").write_text(json.dumps({**settings, **change}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "changed.json"))
    with pytest.raises(InputError, match=told):
        start_accelerator(load_recipe(write_recipe(tmp_path, **SETTINGS)))


@needs_deepspeed
def test_a_missing_deepspeed_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "launch/deepspeed/zero9.json")
    with pytest.raises(InputError, match="launch/deepspeed/zero9.json is not there"):
        start_accelerator(load_recipe(write_recipe(tmp_path, **SETTINGS)))


@needs_deepspeed
def test_deepspeed_skips_and_counts_steps_that_are_not_finite(alone):
    code, _, err = launch("zero2", alone["recipe"], "name=wild", "train.lr=1.0e+30", "train.max_bad_steps=2",
                          processes=1)  # fmt: skip
    assert code and "2 steps in a row gave a non-finite loss or gradient" in err
    assert [m["skipped"] for m in metrics(alone["model"].with_name("wild"))][0] == 0


@pytest.mark.parametrize("config", ["ddp", pytest.param("zero2", marks=needs_deepspeed)])
def test_machines_need_no_common_working_folder(alone, tmp_path, config):
    """Two launches on loopback, as on two machines, each started in a folder of its own."""
    port, processes = str(20000 + os.getpid() % 20000), []
    for rank in (0, 1):
        folder = tmp_path / f"machine{rank}"
        folder.mkdir()
        (folder / "launch").symlink_to(ROOT / "launch")  # DeepSpeed's file is named from where accelerate is called
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                   str(ROOT / "launch" / "accelerate" / f"{config}.yaml"), "--num_processes", "2",
                   "--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1",
                   "--main_process_port", port, str(ROOT / "train" / "distill.py"), str(alone["recipe"]),
                   f"name=machines-{config}"]  # fmt: skip
        processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                          text=True))  # fmt: skip
    for process in processes:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
    assert apart(alone["model"], alone["model"].with_name(f"machines-{config}")) < 1e-5
    assert not list(tmp_path.rglob(".deepspeed_env")), "pdsh's, with the whole environment in it"


def test_machines_that_find_other_weights_are_named(monkeypatch):
    monkeypatch.setattr(processes_module, "gather_object", lambda own: [("a b", "node1"), ("a b", "node2"), *own])
    processes_module.check_same(SimpleNamespace(num_processes=3), "rollouts", "a b")
    with pytest.raises(InputError, match="rollouts: .* finds other ingredients .store a c.*first process .store a b"):
        processes_module.check_same(SimpleNamespace(num_processes=3), "rollouts", "a c")


def test_machines_need_one_run_folder(alone, tmp_path, monkeypatch):
    """The second process looks for the first one's token in its own folder."""
    recipe = load_recipe(alone["recipe"], [f"output={tmp_path}"])
    recipe.run_dir.mkdir()
    first, second = (SimpleNamespace(num_processes=2, is_main_process=main) for main in (True, False))
    sent: list = []

    def broadcast(objects: list) -> list:
        sent[:] = sent or objects
        return sent

    monkeypatch.setattr(processes_module, "broadcast_object_list", broadcast)
    monkeypatch.setattr(processes_module, "gather_object", lambda own: own)
    check_shared_folder(recipe, first)
    check_shared_folder(recipe, second)
    elsewhere = load_recipe(alone["recipe"], [f"output={tmp_path / 'elsewhere'}"])
    with pytest.raises(InputError, match="give `output` as an absolute path on a file system that all machines share"):
        check_shared_folder(elsewhere, second)
