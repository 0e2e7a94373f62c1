"""Training: Ray Train workers that run DeepSpeed, from a laptop to a cluster with one command."""
