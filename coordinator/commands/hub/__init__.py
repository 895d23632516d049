"""The hub: the long-lived coordinator that makes each recipe a process of its own."""
