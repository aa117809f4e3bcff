"""The simulated world, from the side of an NVML client.

The test that runs a script holds the simulated node. A script asks it to act on the hardware by a line on standard
output, and goes on when the answer comes on standard input.
"""

import json
import os
import signal
import subprocess
import sys

import pynvml


def world(action, **arguments):
    """Lets something happen to the hardware, and returns what the test answers."""
    print(json.dumps({"action": action, **arguments}), flush=True)
    answer = json.loads(sys.stdin.readline())
    if "error" in answer:
        raise AssertionError(f"{action}: {answer['error']}")
    return answer.get("ok")


def expect(error, call, *arguments):
    """Calls, and wants exactly this NVML error."""
    try:
        result = call(*arguments)
    except pynvml.NVMLError as raised:
        assert raised.value == error, f"{call.__name__}: wanted {error}, got {raised.value} ({raised})"
        return
    raise AssertionError(f"{call.__name__}: wanted error {error}, got {result!r}")


def raw(name, *arguments):
    """A call without the checks of pynvml; returns the code."""
    return pynvml._nvmlGetFunctionPointer(name)(*arguments)


def gpu_processes(device):
    return [(p.pid, p.gpuInstanceId, p.computeInstanceId) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]


class Client:
    """Another process that has device nodes open, as a GPU program does."""

    def __init__(self, *nodes):
        code = "import os,sys\nfor p in sys.argv[1:]: os.open(p, os.O_PATH)\nprint(flush=True)\nsys.stdin.read()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *nodes], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.process.stdout.readline()
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def capability_node(root, path):
    """The device node of a capability, by the driver's own table."""
    with open(f"{root}/proc/driver/nvidia-caps/mig-minors") as table:
        minor = dict(line.split() for line in table)[path]
    return f"{root}/dev/nvidia-caps/nvidia-cap{minor}"


ROOT = os.environ["DRIVER_ROOT"]
