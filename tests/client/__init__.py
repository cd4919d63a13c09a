"""Tests of the client of live worlds."""
