"""Simulate programs under costs, without running them."""
