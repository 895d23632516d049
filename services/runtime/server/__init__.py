"""What a service process stands on: settings, logs, metrics, errors, the ledger of its effects."""
