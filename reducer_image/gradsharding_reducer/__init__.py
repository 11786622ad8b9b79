"""The reducer: folds one shard of a round over all of its sources, in constant memory, with the standard library and numpy."""

__version__ = "0.1.0"
