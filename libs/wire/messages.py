"""All messages, in one import: importing this module fills the registry."""

from __future__ import annotations

from libs.wire import control, expert, fabric, request, tokens, transfer, xccl

__all__ = ["control", "expert", "fabric", "request", "tokens", "transfer", "xccl"]
