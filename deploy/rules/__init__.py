"""Prometheus' rules as they are read: `python -m deploy.rules` writes the chart's files."""
