"""Reward functions that go wrong in every way; the completion of the first row says how."""

import os
import subprocess
import sys
import time

HELD = []


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
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"\xff" * 64)
            except OSError:
                continue
        time.sleep(1000)
    if how == "twice":
        body = b'{"rewards":[7.0],"metrics":{}}'
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, len(body).to_bytes(4, "big") + body)
            except OSError:
                continue
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
