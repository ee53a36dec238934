"""Enforces the interconnect's bandwidth and latency on every UB frame."""
