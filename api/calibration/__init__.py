"""Calibrations learnt from measurements, stored and listed."""
