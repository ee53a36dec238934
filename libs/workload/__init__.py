"""Requests as a client would send them, and what the monolithic reference answers to each."""
