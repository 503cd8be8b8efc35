"""Seconds and bytes of one layer for one microbatch on one rank."""
