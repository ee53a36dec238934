"""The served model: DeepSeek-V3 numerics in numpy, and text in and out of it."""
