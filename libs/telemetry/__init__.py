"""Logs and metrics; cores never import it, hosts hand it their records."""
