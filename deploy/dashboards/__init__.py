"""Grafana's dashboards as YAML files; `python -m deploy.dashboards` makes their JSON."""
