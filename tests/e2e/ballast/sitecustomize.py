"""Memory that every process of the image loses at its start, so that a function dies of the first tuning and not of a lower one.

A layer of tests: the product has no switch for it. Written to, since memory counts only then.
"""

ballast = bytearray(b"\1") * (100 << 20)
