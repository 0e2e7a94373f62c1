"""Tests of the data: sources, shards, stream, toy distributions."""
