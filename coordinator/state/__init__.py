"""The store: state of the coordinator that must outlive its process."""
