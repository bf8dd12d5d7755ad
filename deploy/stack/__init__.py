"""The service, Prometheus and Alertmanager on one machine: `python -m deploy.stack up`."""
