"""Pairs SEND and RECV of one (prefill TE, decode TE) pair."""
