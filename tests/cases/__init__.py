"""Small inputs that once gave a wrong answer, one module per fault, for every room that takes such inputs to try again.

A module is named after what is special about its input, as in `mxfp4_top_of_range.py`. It opens with what went wrong
and the commit that mended it, and holds the smallest input that shows it, as data or as a function `build` that makes
it, with what is expected where that is a constant. Assertions stay with the tests that import it. Nothing here is
larger than a few kilobytes.
"""
