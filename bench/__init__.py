"""What a person runs: the leaderboard's protocol at home, and what a plan must move (`mla`, or `python -m bench`).

cli.py is the command line; run.py, popcorn.py and explain.py are its commands. A submission only ever runs in a spawned
process: worker.py is the parent's side of it, session.py what happens inside. protocol.py holds the official rules as
numbers, cases.py the cases, timing.py the clocks, roofline.py bytes and bandwidths, report.py and progress.py what is
shown. What is right and wrong is decided in reference.py.
"""
