"""Putting the reducer where it runs: the AWS Lambda package and function."""
