"""The checks of `mla verify`: one file a check, with the needles and the census that they use."""
