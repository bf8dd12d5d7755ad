"""The Grafana dashboard as code: `python -m deploy.dashboards` writes rayloom-overview.json."""
