"""Remakes the shipped checkpoint: corpus, tokenizer, trainer, export, evaluation."""
