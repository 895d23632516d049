"""rolemesh: RL post-training of language models as a mesh of model services."""
