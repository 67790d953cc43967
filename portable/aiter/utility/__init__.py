"""Dtypes and mxfp4 helpers under the real library's module names."""
