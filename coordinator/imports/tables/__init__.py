"""The tables of the page docs/from-others.md, which also make recipes."""
