"""The collect job: options, units, estimate, calibration."""
