"""Grafana's dashboards as code, a YAML file each: `python -m deploy.dashboards` makes the JSON."""
