"""Generated from protos/rolemesh/v1 by `make protos`. Do not edit."""
