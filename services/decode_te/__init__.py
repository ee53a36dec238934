"""Decode DP groups: fetch a request's KV, then produce its tokens, iteration by iteration."""
