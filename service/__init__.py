"""The command line, the HTTP API, the store, and the supervisor that runs the training loop."""

VERSION = "0.2.0"
"""Rayloom's version; pyproject.toml, the chart, the images and CHANGELOG.md name the same."""
