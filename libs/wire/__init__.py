"""Bytes between actors: messages, their registry, the frame codec and the subject table."""
