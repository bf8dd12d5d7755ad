"""The source of Prometheus' rules; `python -m deploy.rules` writes the chart's files."""
