"""Stock inference servers as samplers: requests over HTTP, adapters by files, weights by NCCL."""
