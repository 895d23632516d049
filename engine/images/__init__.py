"""Images of prompts: decoded in a sandbox, made into patches, placed among a row's tokens."""
