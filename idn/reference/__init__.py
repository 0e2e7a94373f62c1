"""The authors' published checkpoints: read without running them, and turned into our own files."""
