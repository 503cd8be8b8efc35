"""Stages, and schedules played out as events."""
