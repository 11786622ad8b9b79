"""Federated learning for real, on one machine: what ``gradsharding demo`` trains, averages, checks and draws."""
