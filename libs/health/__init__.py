"""Presence, heartbeats and what is concluded from them."""
