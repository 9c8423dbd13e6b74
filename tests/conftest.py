"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A test that is slow because its kernels have yet to be compiled, or because others use the machine, has not failed.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")
