"""Parsers of update headers, nothing else."""
