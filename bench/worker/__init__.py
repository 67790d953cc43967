"""The process that a submission runs in: the parent's side, what happens inside, the official protocol, the clocks."""
