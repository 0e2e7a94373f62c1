"""One page from a folder of results: the paper's Table 1 and ours, cost, pictures, and the command of every number."""
