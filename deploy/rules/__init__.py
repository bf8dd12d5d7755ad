"""Prometheus rules; `python -m deploy.rules` writes them into the Helm chart."""
