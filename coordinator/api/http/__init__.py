"""The coordinator over HTTP: REST, live events and the dashboard's files."""
