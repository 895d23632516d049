"""The event loop of a coordinator: its clock, and how seldom garbage is looked for."""
