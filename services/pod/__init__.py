"""The embedded pod: a broker and every service as real processes of one machine."""
