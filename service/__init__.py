"""What the outside of a run touches, and what runs its loop."""

VERSION = "0.2.0"
"""Rayloom's version; pyproject.toml, the chart, the images and CHANGELOG.md have the same."""
