"""Reward functions that go wrong in every way; the completion of the first row says how."""

import contextlib
import os
import subprocess
import sys
import time

HELD = []


def write_everywhere(data):
    """Writes data to every descriptor that this process has, save its three streams."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):
                os.write(descriptor, data)


def behave(completions, **kwargs):
    """Does what the first completion says; "fine" is a reward of 1."""
    how = completions[0]
    if how == "raise":
        raise LookupError("no such thing")
    if how == "hang":
        time.sleep(1000)
    if how == "spin":
        while True:
            pass
    if how == "exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(3)
    if how == "crash":
        os.abort()
    if how == "memory":
        while True:
            HELD.append(bytearray(1 << 24))
    if how == "print":
        while True:
            print("x" * 1000)
    if how == "large":
        return ["x" * 1000] * 1_000_000
    if how == "child":
        # A process that holds the output open and would live on.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        os._exit(4)
    if how == "liar":
        write_everywhere(b"\xff" * 64)
        time.sleep(1000)
    if how == "twice":
        body = b'{"rewards":[7.0],"metrics":{}}'
        write_everywhere(len(body).to_bytes(4, "big") + body)
    if how == "environment":
        return [float("SECRET_TOKEN" in os.environ) + 2 * ("GIVEN_TOKEN" in os.environ)]
    if how == "pid":
        return [float(os.getpid())]
    answers = {
        "few": [],
        "nan": [float("nan")],
        "text": ["1.0"],
        "nested": [[1.0]],
        "none": None,
    }
    return answers.get(how, [1.0] * len(completions))
