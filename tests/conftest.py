"""What all tests share: Hypothesis asserts on no time, machines that run tests are busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("rayloom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rayloom")
