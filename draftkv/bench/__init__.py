"""Comparisons of cost, each of two versions in one run; `eval/bench.py` runs them."""
