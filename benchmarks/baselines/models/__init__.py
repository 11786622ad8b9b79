"""Time and cost of other ways to average on AWS Lambda: the paper's own, the λ-FL tree, and LIFL."""
