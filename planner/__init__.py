"""Specs in, numbers out: the library that prices and ranks layouts for distributed training."""
