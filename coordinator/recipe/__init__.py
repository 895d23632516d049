"""The recipe of a run: its schema, and how it is read and refused."""
