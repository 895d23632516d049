"""`python -m rolemesh`: the command line, for where its script is not on the PATH."""

from rolemesh.coordinator.commands.cli import main

if __name__ == "__main__":
    main()
