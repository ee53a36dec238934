"""Builders and fakes shared by the tests of cores, hosts and scenarios."""
