"""What `mla` does: one file a command, named as the command."""
