"""How rows become micro-batches: balanced over ranks, within a token budget, prompts shared."""
