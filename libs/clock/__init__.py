"""The wall clock, and how it paces the emulated timeline. The only package that reads real time."""
