"""Two machines on this one: network namespaces where the system lets us make them, otherwise addresses of the loopback range.

In a namespace a process sees no address but its machine's. On the loopback range all do, and gloo is told which to take.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
PORT = 29400


@dataclass
class Machine:
    """`start` runs torchrun there, in `folder`, which is the machine's disk."""

    address: str
    interface: str
    prefix: tuple[str, ...]
    folder: Path
    meeting: str  # where the machines meet
    started: list = field(default_factory=list)

    def start(self, script, *arguments, nodes=2, ranks=1, restarts=0, **environment):
        folders = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
        given = {"OMP_NUM_THREADS": "1", "ONEPASS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        given |= {"GLOO_SOCKET_IFNAME": self.interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.meeting, "--local-addr", self.address]
        is_host = int(self.meeting.startswith(f"{self.address}:"))
        meet += ["--rdzv-conf", f"is_host={is_host},keep_alive_interval=1", "--max-restarts", str(restarts)]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks), *meet]
        output = self.folder.parent / f"{self.address}-{len(self.started)}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*self.prefix, *command, str(script), *map(str, arguments)], cwd=self.folder, env=os.environ | given,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        process.output = output
        self.started.append(process)
        return process


@contextmanager
def two_machines(folder):
    """Yield two machines, with folders of their own below `folder`."""
    places = [folder / name for name in "ab"]
    for place in places:
        place.mkdir()
    names = [f"onepass{os.getpid()}{name}" for name in "ab"]
    made, machines = _make_namespaces(names), []
    try:
        if made:
            addresses, interfaces = ("10.77.0.1", "10.77.0.2"), ("veth0", "veth0")
            prefixes = [("ip", "netns", "exec", name) for name in names]
        else:
            addresses, interfaces, prefixes = ("127.0.0.1", "127.0.0.2"), ("lo", "lo"), [(), ()]
        port = PORT if made else PORT + os.getpid() % 1000
        meeting = f"{addresses[0]}:{port}"
        machines = [Machine(*each, place, meeting) for *each, place in zip(addresses, interfaces, prefixes, places, strict=True)]
        yield machines
    finally:
        for process in (process for machine in machines for process in machine.started):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in names if made else ():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _make_namespaces(names):
    """Make two network namespaces that a cable connects. Return whether the system has let us."""
    if shutil.which("ip") is None or os.geteuid():
        return False
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}"]
    for name, address in zip(names, ("10.77.0.1", "10.77.0.2"), strict=True):
        commands += [f"-n {name} {what}" for what in ("link set lo up", f"addr add {address}/24 dev veth0", "link set veth0 up")]
    if all(subprocess.run(["ip", *command.split()], check=False, capture_output=True).returncode == 0 for command in commands):
        return True
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return False
