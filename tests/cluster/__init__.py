"""What needs several machines, as far as one machine can be several."""
