"""Fakes for tests: yours and this project's. No production module imports them."""
