"""KV blocks: who owns each, under which generation, and how many are where."""
