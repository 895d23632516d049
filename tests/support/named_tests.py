"""Tests that pages and tables name: which there are in a file, and with what marks."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def collected(file: str) -> dict[str, set[str]]:
    """Tests of a file below tests/ that pytest takes, with the marks of all of their cases."""
    tree = ast.parse((TESTS / file).read_text())
    of_all = set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            of_all |= set(re.findall(r"mark\.(\w+)", ast.unparse(node.value)))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            applied = [
                ast.unparse(one.func if isinstance(one, ast.Call) else one)
                for one in node.decorator_list
            ]
            found[node.name] = of_all | set(re.findall(r"mark\.(\w+)", " ".join(applied)))
    return found
