"""Stages, and schedules simulated as events."""
