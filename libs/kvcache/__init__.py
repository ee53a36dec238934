"""KV blocks: who owns each, under which generation, how many are where, and what is kept."""
