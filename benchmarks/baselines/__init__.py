"""Other ways to do the same, to be measured against."""
