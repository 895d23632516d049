"""What others may name to a process: only what its owner granted, whatever way a name takes."""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rolemesh.coordinator.explained.keys import sections_in
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.granted import grants
from rolemesh.engine.granted.grants import Grant, NotGrantedError, is_public
from rolemesh.engine.specs import Named, NamedKind, Names, RewardSpec, named_in

FUNCTIONS = """
import asyncio
from functools import partial
from subprocess import getoutput

if True:
    def judge(completions, **columns):
        def inner(): ...
        return [1.0] * len(completions)

class Game:
    def run(self): ...

async def later(completions): ...

half = partial(judge)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of functions, beside another file of Python that is not in it."""
    folder = tmp_path / "functions"
    (folder / "mypackage").mkdir(parents=True)
    (folder / "mine.py").write_text(FUNCTIONS)
    (folder / "mypackage" / "__init__.py").write_text("")
    (folder / "mypackage" / "rewards.py").write_text(FUNCTIONS)
    (tmp_path / "theirs.py").write_text(FUNCTIONS)
    return folder


def code(name: str) -> Named:
    return Named("reward.source.function", "code", name)


@pytest.mark.parametrize("name", ["judge", "Game", "later", "half"])
def test_what_a_file_in_a_root_defines_is_granted(root: Path, name: str) -> None:
    Grant(code_roots=(root,)).check_named(code(f"{root}/mine.py:{name}"))


@pytest.mark.parametrize("name", ["getoutput", "asyncio", "partial", "inner", "run", "__loader__"])
def test_what_a_file_in_a_root_only_imports_or_hides_is_not(root: Path, name: str) -> None:
    with pytest.raises(NotGrantedError, match=f"does not define '{name}'"):
        Grant(code_roots=(root,)).check_named(code(f"{root}/mine.py:{name}"))


def test_what_cannot_be_loaded_is_left_to_the_loader_to_tell(root: Path) -> None:
    grant = Grant(code_roots=(root,))
    (root / "broken.py").write_text("def judge(:\n")
    (root / "all.py").write_text("from subprocess import *\n")
    for name in ("mine.py:no_such", "broken.py:judge", "absent.py:judge"):
        grant.check_named(code(f"{root}/{name}"))
    with pytest.raises(NotGrantedError, match="does not define"):
        grant.check_named(code(f"{root}/all.py:getoutput"))


@pytest.mark.parametrize(
    "name",
    [
        "subprocess:getoutput",  # of the standard library, imported already or not
        "telnetlib:Telnet",
        "os:system",  # frozen into the interpreter
        "os.path:join",
        "sys:exit",  # of the interpreter itself
        "builtins:exec",
        "__main__:main",
        "pydantic:BaseModel",  # of an installed package
        "pydantic.main:BaseModel",
        "no_such_module:f",
        "no such:f",
        "no\0path.py:f",
        ":f",
    ],
)
def test_no_module_is_granted_that_lies_in_no_root(root: Path, name: str) -> None:
    # A root that holds all of the disk does not make the standard library the owner's code.
    for roots in ((), (root,), (Path("/"),)):
        with pytest.raises(NotGrantedError) as refused:
            Grant(code_roots=roots).check_named(code(name))
        for part in ("reward.source.function", repr(name), "--code-root"):
            assert part in str(refused.value)


def test_a_module_in_a_root_is_granted_and_nothing_of_it_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(root))
    (root / "mypackage" / "__init__.py").write_text("raise RuntimeError('it runs')")
    grant = Grant(code_roots=(root,))
    grant.check_named(code("mypackage.rewards:judge"))
    with pytest.raises(NotGrantedError, match="does not define"):
        grant.check_named(code("mypackage.rewards:getoutput"))
    assert "mypackage" not in sys.modules


def test_a_file_in_a_root_does_not_stand_for_the_module_of_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import gives what is imported already, whatever file its path would find first."""
    monkeypatch.syspath_prepend(str(root))
    (root / "subprocess.py").write_text("def getoutput(cmd): ...")
    (root / "math.py").write_text("def sqrt(number): ...")
    for name in ("subprocess:getoutput", "math:sqrt"):
        with pytest.raises(NotGrantedError):
            Grant(code_roots=(root,)).check_named(code(name))


def test_no_way_out_of_a_root_is_granted(root: Path) -> None:
    (root / "linked.py").symlink_to(root.parent / "theirs.py")
    (root / "inside.py").symlink_to(root / "mine.py")
    grant = Grant(code_roots=(root,))
    for way in (f"{root}/../theirs.py", f"{root}/linked.py", f"{root.parent}/theirs.py"):
        with pytest.raises(NotGrantedError, match="--code-root"):
            grant.check_named(code(f"{way}:judge"))
    grant.check_named(code(f"{root}/inside.py:judge"))


def test_an_exact_name_is_granted_and_no_other(root: Path) -> None:
    grant = Grant(code_names=("subprocess:getoutput",))
    grant.check_named(code("subprocess:getoutput"))
    with pytest.raises(NotGrantedError):
        grant.check_named(code("subprocess:getstatusoutput"))


# --- folders, variables, addresses --------------------------------------------------------


def test_a_path_is_granted_in_a_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (tmp_path / "alias").symlink_to(folder)
    grant = Grant(folders=(folder,))
    assert grant.folder(str(folder / "one"), "directory") == folder / "one"
    assert grant.folder(str(folder / "new" / "one"), "directory", writes=True).parent.name == "new"
    assert grant.folder(str(tmp_path / "alias" / "one"), "directory") == folder / "one"
    assert Grant(folders=(tmp_path / "alias",)).folder(str(folder), "directory") == folder
    for path in ("../runs-2/one", "one/../../one", "out/one", "/etc/passwd", "../runs\0"):
        with pytest.raises(NotGrantedError, match="directory is"):
            grant.folder(str(folder / path), "directory")
    with pytest.raises(NotGrantedError, match="--folder"):
        grant.folder(str(folder), "directory", writes=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into every folder")
def test_a_folder_that_cannot_be_made_is_refused_before_work_is_done_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o555)
    grant = Grant(folders=(folder,))
    with pytest.raises(NotGrantedError, match="may not write") as refused:
        grant.folder(str(folder / "new" / "one"), "directory", writes=True)
    assert f"let user {os.geteuid()} write into {folder}" in str(refused.value)
    assert grant.folder(str(folder / "new"), "directory") == folder / "new"


def test_a_variable_is_granted_by_its_name() -> None:
    token = Named("reward.source.token_variable", "variable", "ROLEMESH_API_TOKEN")
    with pytest.raises(NotGrantedError, match=r"token_variable is .*--variable ROLEMESH_API_TOKEN"):
        Grant(variables=("JUDGE_TOKEN",)).check_named(token)
    Grant(variables=("ROLEMESH_API_TOKEN",)).check_named(token)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in the place of DNS; numbers in all their forms are read as ever."""
    look_up = grants.socket.getaddrinfo
    known = {"judge.example": ["93.184.216.34"], "mixed.example": ["93.184.216.34", "10.0.0.7"]}

    def found(host: str, *arguments: Any, **named: Any) -> Any:
        if host in known:
            return [(2, 1, 6, "", (address, 0)) for address in known[host]]
        if host.endswith(".example"):
            raise OSError("unknown")
        return look_up(host, *arguments, **named)

    monkeypatch.setattr(grants.socket, "getaddrinfo", found)


def url(value: str, *, gets_secret: bool = False) -> Named:
    return Named("reward.source.urls.0", "url", value, gets_secret)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    "value",
    [
        "http://127.0.0.1:8000/reward",
        "http://localhost/reward",
        "http://0.0.0.0/reward",
        "http://2130706433/reward",  # 127.0.0.1 as one number
        "http://0x7f.1/reward",
        "http://10.1.2.3/reward",
        "http://192.168.1.1/reward",
        "http://169.254.169.254/latest/meta-data",
        "http://100.64.0.1/reward",
        "http://224.0.0.1/reward",
        "http://[::1]:8000/reward",
        "http://[::ffff:10.0.0.1]/reward",
        "http://[64:ff9b::a00:1]/reward",
        "http://[2002:a00:1::]/reward",
        "http://[fe80::1]/reward",
        "grpc://[fd00::1]:50051",
        "10.0.0.1:50051",
        "http://mixed.example/reward",  # one of its addresses is private
        "http://unknown.example/reward",
        "http://judge.example\\@10.0.0.1/reward",
        "http://judge.example@10.0.0.1/reward",
        "file:///etc/passwd",
        "sqlite:////data/mlflow.db",
        "unix:///run/redis",
        "http:///reward",
        "http://judge.example:x/reward",
    ],
)
def test_no_address_of_a_private_network_is_granted(value: str) -> None:
    with pytest.raises(NotGrantedError, match=r"reward\.source\.urls\.0 is"):
        Grant().check_named(url(value))
    Grant(hosts=None).check_named(url(value))


@pytest.mark.usefixtures("names")
def test_public_addresses_are_granted_and_others_by_name() -> None:
    Grant().check_named(url("https://judge.example/reward"))
    Grant().check_named(url("http://93.184.216.34:8000/reward"))
    for host in ("127.0.0.1", "127.0.0.1:8000"):
        Grant(hosts=(host,)).check_named(url("http://127.0.0.1:8000/reward"))
    with pytest.raises(NotGrantedError, match=r"--allow-host 127\.0\.0\.1"):
        Grant(hosts=("127.0.0.1:8001",)).check_named(url("http://127.0.0.1:8000/reward"))
    Grant(hosts=("::1",)).check_named(url("grpc://[::1]:50051"))
    Grant(hosts=("actor:50051",)).check_named(url("actor:50051"))
    Grant(hosts=("sqlite:////data/m.db",)).check_named(url("sqlite:////data/m.db"))


@pytest.mark.usefixtures("names")
def test_a_secret_goes_to_named_hosts_alone() -> None:
    spec = RewardSpec.model_validate(
        {
            "source": {
                "type": "openrlhf",
                "urls": "https://judge.example/reward",
                "token_variable": "JUDGE_TOKEN",
            }
        }
    )
    grant = Grant(variables=("JUDGE_TOKEN",))
    with pytest.raises(NotGrantedError, match=r"reward\.source\.urls\.0 is .*a secret goes along"):
        grant.check(spec, "reward.")
    allowed = Grant(variables=("JUDGE_TOKEN",), hosts=("judge.example",))
    allowed.check(spec, "reward.")
    with pytest.raises(NotGrantedError, match="a secret goes along"):
        grant.check_named(url("https://judge.example", gets_secret=True))


def test_a_function_s_own_connections_are_granted_as_such() -> None:
    source = {"type": "python", "function": "mine:judge", "network": True}
    spec = RewardSpec.model_validate({"source": source})
    grant = Grant(code_names=("mine:judge",), hosts=None)
    with pytest.raises(NotGrantedError, match=r"reward\.source\.network is .*--function-network"):
        grant.check(spec, "reward.")
    replace(grant, network=True).check(spec, "reward.")
    grant.check(RewardSpec.model_validate({"source": {**source, "network": False}}), "reward.")


def test_public_means_public() -> None:
    assert is_public("8.8.8.8")
    assert is_public("2606:4700::1111")
    assert is_public("::ffff:8.8.8.8")
    assert not is_public("fe80::1%eth0")


# --- every field of a recipe --------------------------------------------------------------

HARMLESS = {
    "answer", "answer_input", "args", "assistant_prefix", "basis", "by", "chosen", "completion",
    "completion_input", "config", "default", "devices", "entity", "experiment", "group",
    "held_out_split", "host", "images", "kwargs", "label", "messages", "metadata", "metric",
    "model", "model_name", "name", "named", "options", "output", "own_functions", "pool", "pools",
    "project", "prompt", "prompt_input", "question_template", "reads", "reasoning_parser",
    "rejected", "reward_key", "roles", "rows", "rubric", "server_folder", "services", "settings",
    "space", "space_id", "split", "stop", "system_prompt", "target", "targets", "task", "template",
    "text", "to", "tool_parser", "version", "weights", "workspace",
}  # fmt: skip
"""Texts that name nothing of this host and no address: columns, labels, projects of a tracker, keys
of a mapping, a folder as other hosts name it. The keys of a space of tuning are a closed list, none
of which names anything; nor do the operations of a traced loss, which are a closed list, too."""

NAMED: dict[NamedKind, set[str]] = {
    "code": {"environment", "function", "tracker", "run"},
    "command": {"command"},
    "path": {
        *("path", "held_out_path", "tokenizer", "directory", "token_file", "policy_folder"),
        *("password_file", "certificates", "certificate", "read", "drive", "readable"),
        *("start", "shared_folder", "chat_template", "folder"),
    },
    "url": {"urls", "address", "addresses", "tracking_uri", "endpoint", "url"},
    "variable": {"token_variable", "environment", "variables"},
    "network": {"network"},
}


def sections(section: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if section in seen:
        return
    seen.add(section)
    yield section
    for field in section.model_fields.values():
        for inner in sections_in(field.annotation):
            yield from sections(inner, seen)


def plain_types(annotation: Any) -> set[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return set()
    arguments = typing.get_args(annotation)
    return set().union(*map(plain_types, arguments)) if arguments else {annotation}


def test_every_text_of_a_recipe_is_known_to_name_something_or_nothing() -> None:
    """A new field is added here: marked with what it names, or as harmless."""
    found: dict[str, set[str]] = {kind: set() for kind in NAMED}
    plain = set()
    for section in sections(Recipe, set()):
        for name, field in section.model_fields.items():
            mark = next((one for one in field.metadata if isinstance(one, Names)), None)
            types = plain_types(field.annotation)
            if mark is not None:
                found[mark.kind].add(name)
            elif Path in types:
                found["path"].add(name)
            elif {str, Any} & types:
                plain.add(name)
    assert found == NAMED
    assert plain == HARMLESS


def test_a_spec_s_names_are_found_however_deep_they_stand() -> None:
    spec = RewardSpec.model_validate(
        {
            "source": [
                "python:mine.py:judge",
                {"source": {"type": "openrlhf", "urls": "http://h/r", "tokenizer": "models/t"}},
            ],
        }
    )
    assert list(named_in(spec, "reward.")) == [
        Named("reward.source.rewards.0.source.function", "code", "mine.py:judge"),
        Named("reward.source.rewards.1.source.urls.0", "url", "http://h/r"),
        Named("reward.source.rewards.1.source.tokenizer", "path", "models/t"),
    ]
