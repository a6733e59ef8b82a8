"""Acceptance length: the walk, replay, live decoding, intervals and reports."""
