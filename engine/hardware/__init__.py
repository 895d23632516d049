"""The devices, threads and memory of a process."""
