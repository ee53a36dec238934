"""Prefill DP groups: run prompts, keep their KV until the decode side has it."""
