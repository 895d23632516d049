"""The ranks of a service: how they start, meet and answer as one."""
