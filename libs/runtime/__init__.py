"""Hosts that run cores: one process on a bus, or a whole pod on one heap of integer nanoseconds."""
