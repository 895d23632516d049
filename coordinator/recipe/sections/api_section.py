"""The section `api` of a recipe: where a coordinator answers its clients, and who they are."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rolemesh.engine.specs import Spec


class TokenFiles(Spec):
    """Files that hold tokens with less than all rights."""

    read: Path | None = None
    """With its token a client may look, and change nothing."""
    drive: Path | None = None
    """With its token a client may also steer runs, and make the steps of an external one."""


class ApiSpec(Spec):
    """Where the run's coordinator answers while the run goes on, and who may ask."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach needs a token and a certificate."""
    http_port: int | None = Field(default=0, ge=0, lt=2**16)
    """Port of REST and the dashboard; 0 takes a free one, null serves none."""
    grpc_port: int = Field(default=0, ge=0, lt=2**16)
    """Port of CoordinatorService; 0 takes a free one."""
    member_port: int | None = Field(default=None, ge=0, lt=2**16)
    """Port of CoordinatorService for clients that show a certificate of the mesh instead of a
    token, and of the registry of its services; 0 takes a free one, null serves none."""
    token_file: Path | None = None
    """File with the token that allows everything; None: the variable ROLEMESH_API_TOKEN, where it
    is set, else a token that is made here, in the file api-token of the run's folder."""
    tokens: TokenFiles = TokenFiles()
    """Further tokens, for clients that may do less."""
    certificate: Path | None = None
    """PEM file, readable by its owner alone, with a key and the certificate that gRPC and REST show
    to clients: coordinator.pem of `rolemesh certs`, or your own with those that signed it. None:
    clients on loopback are talked to in clear, others by coordinator.pem of `certificates`."""
    allow_remote: bool = False
    """Permit a host that others can reach without a certificate: who reads the traffic, reads the
    token. Only inside a private network."""
    open_to_every_local_user: bool = False
    """Ask for no token: every user and program of this machine may then start, change and read
    runs, with your rights. Only on loopback."""
