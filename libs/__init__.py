"""Shared code of the pod: cores' contract, hosts, bus, wire, fabric, model. Never imports
`services`.
"""
