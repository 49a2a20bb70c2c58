"""For all tests: Hypothesis measures no time, since a busy machine would fail tests by it."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
