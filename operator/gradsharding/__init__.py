"""GradsSharding: serverless aggregation for federated learning. Rounds, platforms, store, command line."""

from gradsharding_reducer import __version__

__all__ = ["__version__"]
