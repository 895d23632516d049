"""Commands of `rolemesh`, one module each with its `app`; cli.py lists them."""
