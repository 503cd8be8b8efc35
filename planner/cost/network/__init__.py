"""Seconds of collectives and sends on a fabric."""
