"""Base of a service process: settings, logs, metrics, errors, the ledger of its effects."""
