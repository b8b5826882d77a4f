"""The recipes of examples/scale run as far as CPUs take them: two "machines" are two launchers on this host's loopback."""

import argparse
import ast
import importlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from onepass import cli

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "scale"
TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 300 --micro-batch-size 2"
TINY += " --global-batch-size 4 --device cpu --no-table --no-fusion-table --samples 0 --eval-iters 1 --log-interval 1"


@pytest.fixture
def programs(tmp_path):
    """A folder for PATH. `torchrun` is this Python's."""
    folder = tmp_path / "programs"
    folder.mkdir()
    write_program(folder / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    return folder


def write_program(path, *lines):
    path.write_text("\n".join(("#!/usr/bin/env bash", *lines, "")))
    path.chmod(0o755)


def environment(programs, **more):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PET_", "TRITON"))}
    env |= {"PATH": f"{programs}{os.pathsep}{env['PATH']}", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    return env | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ONEPASS_BACKEND": "torch"} | more


def text_of(folder):
    folder.mkdir()
    (folder / "one.txt").write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(400)))
    return folder


def free_port():
    """Return one below those that the system gives to connections, which another process could have had by now."""
    for port in random.sample(range(20_000, 29_000), 100):
        with socket.socket() as it, suppress(OSError):
            it.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def ended(processes, seconds=200):
    """Wait for all. Return what each wrote; the test fails if one did."""
    try:
        with ThreadPoolExecutor(len(processes)) as pool:  # a pipe that nobody reads fills up, and its writer waits
            outputs = list(pool.map(lambda process: process.communicate(timeout=seconds)[0], processes))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs


def start(command, folder, env):
    return subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


# ---- Slurm ----


@pytest.fixture
def slurm(programs, tmp_path):
    """What srun, scancel and scontrol do with a job of two nodes, as Slurm's manual has it."""
    write_program(
        programs / "srun",
        "while [[ $1 == --* ]]; do shift; done",
        "status=0 pids=()",
        'for node in 0 1; do "$@" & pids+=($!); done',
        f'echo "${{pids[@]}}" > {tmp_path}/step',
        'for pid in "${pids[@]}"; do wait "$pid" || status=$?; done',
        "exit $status",
    )
    write_program(programs / "scancel", f'[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat {tmp_path}/step)')
    write_program(
        programs / "scontrol",
        '[ "$*" = "show hostnames nodes[1-2]" ] && echo 127.0.0.1 && echo 127.0.0.2',
        f'[ "$*" = "requeue 7" ] && touch {tmp_path}/requeued',
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_GPUS_ON_NODE": "1"}
    return environment(programs, RUN_DIR=str(tmp_path / "run"), **job)


@pytest.mark.slow
def test_a_preempted_job_goes_on(slurm, tmp_path):
    command = ["bash", str(RECIPES / "train.sbatch"), *TINY.split(), "--data", str(text_of(tmp_path / "texts")), "--train-iters"]
    job = start([*command, "5000"], tmp_path, slurm | {"PORT": str(free_port())})
    log, limit = tmp_path / "run" / "log.csv", time.monotonic() + 300
    while not log.exists() or log.read_text().count("\n") < 4:
        assert job.poll() is None and time.monotonic() < limit, job.communicate()[0] if job.poll() is not None else "no step"
        time.sleep(0.2)
    os.kill(job.pid, signal.SIGUSR1)  # Slurm's, to the script alone
    ended([job])
    assert (tmp_path / "requeued").exists()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    saved = int(checkpoint.name.removeprefix("step-"))
    assert 3 <= saved < 5000

    (tmp_path / "requeued").unlink()
    ended([start([*command, str(saved + 2)], tmp_path, slurm | {"PORT": str(free_port())})])
    steps = [int(line.partition(",")[0]) for line in log.read_text().splitlines()[1:]]
    assert steps == list(range(saved + 2)) and not (tmp_path / "requeued").exists()


def test_a_job_that_fails_is_not_requeued(slurm, programs, tmp_path):
    write_program(programs / "srun", "exit 3")
    assert subprocess.run(["bash", str(RECIPES / "train.sbatch")], cwd=tmp_path, env=slurm).returncode == 3
    assert not (tmp_path / "requeued").exists()


# ---- Kubernetes ----


def container_of(job):
    """Return the command of a job's nodes, and the environment that its operator gives each of two."""
    spec = job["spec"]
    if job["kind"] == "PyTorchJob":
        policy, replicas = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
        (container,) = replicas["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and replicas["replicas"] == policy["minReplicas"] == policy["maxReplicas"] == 2
        shared = {"RDZV_BACKEND": policy["rdzvBackend"], "NNODES": "2:2", "MAX_RESTARTS": str(policy["maxRestarts"])}
        nodes = [shared | {"RDZV_ENDPOINT": "127.0.0.1:{port}"}] * 2
    else:
        container = spec["trainer"]
        assert container["numNodes"] == 2
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
        nodes = [{"NNODES": "2", "NODE_RANK": str(rank)} | meeting for rank in range(2)]
    env = {each["name"]: each["value"] for each in container["env"]}
    return [*container["command"], *container["args"]], [
        env | {f"PET_{name}": value for name, value in (node | {"NPROC_PER_NODE": "1"}).items()} for node in nodes
    ]


def started_pods(name, programs, tmp_path, command_of):
    """Start both pods with the command that `command_of` makes of the job's, whose flags are parsed as they stand."""
    command, nodes = container_of(yaml.safe_load((RECIPES / f"{name}.yaml").read_text()))
    words = shlex.split(command[-1])
    words = words[words.index("onepass") + 1 :]
    cli._parser(words).parse_args(words)
    command[-1] = command_of(command[-1].replace("/shared", str(tmp_path)))
    port = str(free_port())
    envs = [{key: value.replace("{port}", port) for key, value in node.items()} for node in nodes]
    ended([start(command, tmp_path, environment(programs, **env)) for env in envs])


@pytest.mark.slow
def test_pods_of_a_pytorchjob_train(programs, tmp_path):
    text_of(tmp_path / "texts")
    tiny = f"{TINY} --train-iters 3"
    started_pods("pytorchjob", programs, tmp_path, lambda command: command.replace("--preset 8B --use-fsdp", tiny))
    assert (tmp_path / "run" / "log.csv").read_text().count("\n") == 4  # a head, and three steps


def test_pods_of_a_trainjob_meet(programs, tmp_path):
    write_program(programs / "rank", f'echo "$WORLD_SIZE $TORCHELASTIC_MAX_RESTARTS $*" > {tmp_path}/rank$RANK')
    started_pods("trainjob", programs, tmp_path, lambda command: command.replace("-m onepass", "--no-python rank"))
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1] and said[0].startswith(f"2 3 train --run-dir {tmp_path}/run --resume-if-exists")


# ---- accelerate ----


@pytest.mark.slow
def test_trainer_under_fsdp2(tmp_path):
    """Losses are stock's, with all weights and with LoRA. From a checkpoint in parts they have the bits of the run before."""
    for package in ("transformers", "accelerate", "peft"):
        pytest.importorskip(package)
    options = f"--num_processes 2 --mixed_precision no --main_process_ip 127.0.0.1 --main_process_port {free_port()}"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(RECIPES / "fsdp2.yaml"), *options.split()]
    ranks, env = str(Path(__file__).with_name("trainer_ranks.py")), environment(tmp_path)
    said, _ = ended([start([*launch, "--machine_rank", str(rank), ranks], tmp_path, env) for rank in range(2)])
    assert said.count("onepass in ") == 3  # the report of each run that isn't stock's
    ours, stock, lora, stock_lora, resumed = (
        list(json.loads((tmp_path / name / "losses.json").read_text()).values())
        for name in ("ours", "stock", "lora", "stock lora", "resumed")
    )
    assert len(ours) == 4 and ours == pytest.approx(stock, rel=1e-5) and lora == pytest.approx(stock_lora, rel=1e-5)
    assert resumed == ours and ours[-1] < ours[0] and lora != ours
    assert len(list((tmp_path / "ours" / "checkpoint-2" / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2


# ---- Megatron-LM ----


def test_megatron_flags(programs, tmp_path):
    write_program(programs / "torchrun", f'printf "%s\\n" "$@" > {tmp_path}/words')
    command = ["bash", str(RECIPES / "megatron_gpt.sh"), "--mock-data"]
    subprocess.run(command, env=environment(programs, MASTER="there", PORT="1", NODES="4"), check=True)
    words = (tmp_path / "words").read_text().splitlines()
    split = words.index("pretrain_gpt.py")
    assert words[split - 2 : split] == ["-m", "onepass.integrations.megatron"] and words[-1] == "--mock-data"
    assert {"--nnodes": "4", "--rdzv-endpoint": "there:1"}.items() <= dict(pairwise(words)).items()
    module, function = words[(at := words.index("--spec") + 1) : at + 2]
    assert callable(vars(importlib.import_module(module))[function])  # as Megatron-LM looks it up
    assert subprocess.run(command, env=environment(programs), capture_output=True).returncode == 1  # where do they meet?
    arguments = pytest.importorskip("megatron.training.arguments")
    from onepass.integrations import megatron

    installed = megatron.install()
    try:
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        args = parser.parse_args(words[split + 1 :])
    finally:
        installed.undo()
    assert args.cross_entropy_fusion_impl == "linear" and args.num_query_groups == 8


# ---- torchtitan ----


def test_torchtitan_config():
    source = (RECIPES / "torchtitan_llama3.py").read_text()
    named = re.findall(r'"onepass\.integrations\.torchtitan\.(\w+)"', source)
    ours = ast.parse((ROOT / "src" / "onepass" / "integrations" / "torchtitan.py").read_text())
    defined = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)}
    assert named == ["block", "loss"] and {*named} <= defined
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    sys.path.insert(0, str(RECIPES))
    try:
        manager = importlib.import_module("torchtitan.config.manager").ConfigManager()
        flags = "--module torchtitan_llama3 --config llama3_8b --parallelism.tensor_parallel_degree 2"
        config = manager.parse_args(flags.split())
    finally:
        sys.path.remove(str(RECIPES))
    assert config.override.imports and config.parallelism.tensor_parallel_degree == 2
