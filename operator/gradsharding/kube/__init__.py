"""The Kubernetes operator. The only package that imports Kopf."""
