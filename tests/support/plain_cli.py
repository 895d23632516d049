"""The command line, whose runs have no identities: what encryption costs is seen beside it."""

from rolemesh.coordinator.commands import cli
from rolemesh.coordinator.run import session
from rolemesh.coordinator.run.services.identities import RunIdentities

session.identities_of = lambda *_: RunIdentities()  # type: ignore[assignment]

if __name__ == "__main__":
    cli.main()
