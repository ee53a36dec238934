"""One MoE die: computes what arrives, holds no request state."""
