"""One folder per service. A service never imports another; only `superpod`, `pod` and `cli`
compose.
"""
