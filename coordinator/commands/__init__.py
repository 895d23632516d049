"""Commands of `rolemesh`, one module each; cli.py registers them."""
