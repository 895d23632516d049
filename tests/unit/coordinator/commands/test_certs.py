"""`rolemesh certs`: an authority in a folder, and identities that it signs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from rolemesh.coordinator.commands.certs import app
from rolemesh.rpc.members.identity import Identity


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Identity.read(path).certificate)


def names(path: Path) -> x509.SubjectAlternativeName:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return found.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run("init", tmp_path / "certs")
    return tmp_path / "certs"


def test_issued_identities_name_the_member_and_are_signed(folder: Path) -> None:
    run("issue", folder, "coordinator", "actor", "client/read", "--host", "gpu-1", "--days", "7")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("actor.pem", "authority.crt", "authority.pem", "client-read.pem", "coordinator.pem"),
    ]
    for path in folder.glob("*.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # What clients trust is no secret, and holds none.
    assert (folder / "authority.crt").read_bytes() == Identity.read(folder / "actor.pem").authority
    authority = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
    for name, member in (("actor", "actor"), ("client-read", "client/read")):
        one = certificate(folder / f"{name}.pem")
        one.verify_directly_issued_by(authority)
        found = names(folder / f"{name}.pem")
        assert found.get_values_for_type(x509.UniformResourceIdentifier) == [
            f"rolemesh://mesh/{member}"
        ]
        assert (
            6.9 < (one.not_valid_after_utc - one.not_valid_before_utc).total_seconds() / 86400 < 7.1
        )
    assert names(folder / "actor.pem").get_values_for_type(x509.DNSName) == ["rolemesh", "gpu-1"]
    # A client is no server, whatever it calls itself.
    client = certificate(folder / "client-read.pem")
    uses = client.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert names(folder / "client-read.pem").get_values_for_type(x509.DNSName) == []


def test_renewed_identities_are_of_the_same_members_with_new_keys(folder: Path) -> None:
    run("issue", folder, "actor", "critic", "--host", "10.0.0.7", "--days", "1")
    before = {name: Identity.read(folder / f"{name}.pem") for name in ("actor", "critic")}
    run("renew", folder, "actor", "--days", "30")
    after = {name: Identity.read(folder / f"{name}.pem") for name in ("actor", "critic")}
    assert after["critic"] == before["critic"]
    assert after["actor"].key != before["actor"].key
    assert after["actor"].authority == before["actor"].authority
    found = names(folder / "actor.pem")
    assert [str(one) for one in found.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    run("renew", folder)
    assert Identity.read(folder / "critic.pem").key != before["critic"].key
    shown = run("list", folder)
    assert "actor.pem" in shown
    assert "10.0.0.7" in shown
    assert "authority" not in shown


def test_what_is_there_is_not_overwritten(folder: Path) -> None:
    before = (folder / "authority.pem").read_bytes()
    assert "members trust that one" in run("init", folder, code=2)
    assert (folder / "authority.pem").read_bytes() == before
    run("issue", folder, "actor")
    assert f"renew {folder} actor" in run("issue", folder, "actor", code=2)


@pytest.mark.parametrize("member", ["client/root", "Actor", "../actor", "client/", ""])
def test_unknown_members_are_refused(member: str, folder: Path) -> None:
    assert "give coordinator, a role such as actor" in run("issue", folder, member, code=2)
    assert {path.name for path in folder.iterdir()} == {"authority.crt", "authority.pem"}


def test_a_folder_without_an_authority_is_refused(tmp_path: Path) -> None:
    assert f"rolemesh certs init {tmp_path}" in run("issue", tmp_path, "actor", code=2)
