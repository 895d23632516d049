"""The hosts of a service: how their agents find each other, meet, and end together."""
